"""zl/config_sources: what a file, the environment and flags say, and where; of any settings, zl's or not."""

from __future__ import annotations

import pytest

from zl.config_sources import from_environ, from_file, from_flags
from zl.errors import ConfigError

SECTIONS = {"speed": "engine", "doors": "body", "colour": "body"}


def test_a_file_gives_each_setting_with_its_line(tmp_path):
    path = tmp_path / "car.toml"
    path.write_text('[body]\n\ncolour = "red"\n"doors" = 5\n\n[engine]\nspeed.top = 9\n')
    assert list(from_file(path, SECTIONS)) == [
        ("colour", f"{path}:3", "red"),
        ("doors", f"{path}:4", 5),
        ("speed", f"{path}:7", {"top": 9}),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[body]\ncolor = 1\n", ":2: unknown key 'color' in [body]: did you mean 'colour'?"),
        ("[engine]\ndoor = 1\n", ":2: unknown key 'door' in [engine]: did you mean 'doors' in [body]?"),
        ("[engine]\ndoors = 1\n", ":2: doors belongs in the table [body], not in [engine]"),
        ("[engines]\n", ":1: unknown table 'engines': did you mean 'engine'? (tables: body, engine)"),
        ("doors = 3\n", ":1: doors belongs in the table [body] (tables: body, engine)"),
    ],
)
def test_what_is_no_setting_is_refused_with_its_line(tmp_path, text, words):
    path = tmp_path / "car.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        list(from_file(path, SECTIONS))
    assert str(caught.value) == f"{path}{words}"


def test_the_environment_and_flags_give_what_was_said():
    environ = {"ZL_SPEED": "3", "SPEED": "4", "ZL_CONNECT": "x", "ZL_CONFIG": "y"}
    assert list(from_environ(environ, SECTIONS)) == [("speed", "environment variable ZL_SPEED", "3")]
    assert list(from_flags({"doors": 0, "colour": None}, SECTIONS)) == [("doors", "--doors", 0)]
    for source, culprit in ((from_environ, "ZL_SPED"), (from_flags, "sped")):
        with pytest.raises(ConfigError, match=f"{culprit}.*did you mean '(ZL_SPEED|speed)'"):
            list(source({culprit: "1"}, SECTIONS))


def test_what_clients_read_is_no_unknown_setting():
    environ = {"ZL_CONNECT": "unix:/x", "ZL_CA": "/ca.pem", "ZL_CONFIG": "/zl.toml", "ZL_SPEED": "9", "HOME": "/"}
    assert list(from_environ(environ, SECTIONS)) == [("speed", "environment variable ZL_SPEED", "9")]
