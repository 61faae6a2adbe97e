"""The file of `zl switch`: the shipped examples can be read, and what is wrong in one is said with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from zl.errors import ConfigError
from zl.tools import fleet

DEPLOY = Path(__file__).parents[2] / "deploy"
PLAIN = """
[switch]
traffic = "shared"
[instances.blue]
address = "unix:/run/blue"
unit = "zl@blue.service"
[instances.green]
address = "unix:/run/green"
start = ["start", "green"]
stop = ["stop", "green"]
"""


def load(tmp_path, text):
    path = tmp_path / "switch.toml"
    path.write_text(text)
    return fleet.load(path)


@pytest.mark.parametrize("name", ["blue-green", "haproxy"])
def test_the_shipped_examples_are_right(name):
    found = fleet.load(DEPLOY / name / "switch.toml")
    assert [each.name for each in found.instances] == ["blue", "green"]
    assert found.traffic == ("shared" if name == "blue-green" else "haproxy")
    assert found.named("green").start_command == ("systemctl", "start", "zl@green.service")


def test_a_unit_is_stopped_with_its_socket_or_a_ping_would_start_it_again(tmp_path):
    blue, green = load(tmp_path, PLAIN).instances
    assert blue.stop_command == ("systemctl", "stop", "zl@blue.socket", "zl@blue.service")
    assert (green.start_command, green.stop_command) == (("start", "green"), ("stop", "green"))
    assert green.server == "green"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("traffic = \"shared\"", "traffic = \"magic\""), "must be one of shared, haproxy, command"),
        (("traffic = \"shared\"", "traffic = \"haproxy\""), "needs sockets"),
        (("traffic = \"shared\"", "traffic = \"command\""), "move is needed"),
        (("traffic = \"shared\"", "traffik = 1"), "did you mean 'traffic'"),
        (("traffic = \"shared\"", "steady_s = -1"), "must be seconds, above 0"),
        (("traffic = \"shared\"", "canary = 1"), "must be true or false"),
        (("[switch]", "[swich]"), "did you mean 'switch'"),
        (("unit = \"zl@blue.service\"", ""), "either unit, or both start and stop"),
        (("stop = [\"stop\", \"green\"]", ""), "either unit, or both start and stop"),
        (("stop = [\"stop\", \"green\"]", "stop = \"stop green\""), "must be a list of texts"),
        (("address = \"unix:/run/blue\"", ""), "needs address"),
        (("unix:/run/blue", "/run/blue"), "is no address"),
        (("unix:/run/blue", "unix:/run/green"), "the same address"),
        (("address = \"unix:/run/blue\"", "address = \"unix:/b\"\nready = \"readyz\""), "must be a URL"),
        (("[instances.blue]", "[instances"), "not valid TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path, change, complaint):
    assert change[0] in PLAIN
    with pytest.raises(ConfigError, match=complaint) as error:
        load(tmp_path, PLAIN.replace(*change))
    assert complaint == "is no address" or "switch.toml" in str(error.value)


def test_one_instance_is_no_fleet_and_an_unknown_one_is_named(tmp_path):
    with pytest.raises(ConfigError, match="at least two"):
        load(tmp_path, PLAIN.partition("[instances.green]")[0])
    with pytest.raises(ConfigError, match="did you mean 'green'"):
        load(tmp_path, PLAIN).named("gren")
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        fleet.load(tmp_path / "nothing.toml")
