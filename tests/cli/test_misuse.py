"""zl/cli/misuse.py: what is written instead, through the command line as it is."""

from __future__ import annotations

import pytest

from zl.cli import main


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ask --temprature 0 hi", "ask: unknown flag --temprature: did you mean --temperature?"),
        ("ask hi --temprature=0", "ask: unknown flag --temprature: did you mean --temperature?"),
        ("ask hello big world", 'ask: one question, not several words: quote it: zl ask "hello big world"'),
        ("ask --model m.gguf hi", "ask: unknown flag --model: the server has the model: zl serve --model MODEL"),
        ("serve --port 7439", "serve: unknown flag --port: write --listen tcp:HOST:PORT, such as"),
        ("serve m.gguf", "serve: unexpected 'm.gguf': the model has a flag: zl serve --model m.gguf"),
        ("serve --max-row 3x --rows 4", "serve: unknown flag --rows: did you mean --max-rows?"),
        ("build --model m.gguf", "build: unknown flag --model: the model stands without a flag: zl build MODEL"),
        ("build a.gguf b.gguf", "build: unexpected 'b.gguf'; zl build --help says what it takes"),
        ("doctor --qqqq", "doctor: unknown flag --qqqq; zl doctor --help lists those it has"),
    ],
)
def test_a_word_that_is_not_known_says_what_to_write_instead(line, words, capsys):
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (only,) = said.err.splitlines()
    assert only.startswith(f"zl: {words}")


def test_a_flag_before_any_command_is_wrong_use_too(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--prot", "1"])
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
