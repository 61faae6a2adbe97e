"""zl/cli/misuse.py: what is written instead, through the command line as it is."""

from __future__ import annotations

import argparse

import pytest

from zl.cli import build_parser, main
from zl.cli.connecting import token_of_flag
from zl.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ask --temprature 0 hi", "ask: unknown flag --temprature: did you mean --temperature?"),
        ("ask hi --temprature=0", "ask: unknown flag --temprature: did you mean --temperature?"),
        ("ask hello big world", 'ask: one question, not several words: quote it: zl ask "hello big world"'),
        ("ask --model m.gguf hi", "ask: unknown flag --model: the server has the model: zl serve --model MODEL"),
        ("serve --port 7439", "serve: unknown flag --port: write --listen tcp:HOST:PORT, such as"),
        ("serve m.gguf", "serve: unexpected 'm.gguf': the model has a flag: zl serve --model m.gguf"),
        ("serve --max-rows 3x --rows 4", "serve: unknown flag --rows: did you mean --max-rows?"),
        ("build --model m.gguf", "build: unknown flag --model: the model stands without a flag: zl build MODEL"),
        ("build a.gguf b.gguf", "build: unexpected 'b.gguf'; zl build --help says what it takes"),
        ("serve --auth-token secret", "serve: unknown flag --auth-token: a secret is no flag, for others can read it: "
         "--auth-token-file FILE, or ZL_AUTH_TOKEN"),
        ("ask --auth-token=secret hi", "ask: unknown flag --auth-token: a secret is no flag"),
        ("serve --max-row 5", "serve: unknown flag --max-row: did you mean --max-rows?"),
        ("ask --temp 0 hi", "ask: unknown flag --temp: did you mean --temperature?"),
        ("serve --system-prompts x", "serve: unknown flag --system-prompts: this setting has no flag here: "
         "system_prompts in the table [model] of the file that --config names, or ZL_SYSTEM_PROMPTS in the "
         "environment"),
        ("doctor --max-rows 5", "doctor: unknown flag --max-rows: this setting has no flag here: max_rows in the table "
         "[limits]"),
        ("server", "unknown command 'server': did you mean serve?"),
        ("run --model x", "unknown command 'run': did you mean serve?"),
        ("qqqq", "unknown command 'qqqq'; zl --help lists those it has"),
        ("frame --type FOO x", "flags: type cannot be 'FOO': it is one of chat, summarize, creative, or a number"),
        ("top --metrics tcp:h:1", "'tcp:h:1' is no HOST:PORT: write it without tcp:, as in h:1"),
        ("serve --metrics tcp:127.0.0.1:1", "metrics = 'tcp:127.0.0.1:1' (--metrics): must be HOST:PORT or off; "),
        ("ask --auth-token-file /nope hi", "--auth-token-file /nope: No such file or directory; name a file"),
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
    assert "unknown flag --prot: a command comes first" in capsys.readouterr().err


def test_an_empty_token_file_is_named_by_no_accident():
    with pytest.raises(ConfigError, match="--auth-token-file names no file"):
        token_of_flag(argparse.Namespace(auth_token_file=""))
    assert token_of_flag(argparse.Namespace(auth_token_file=None)) is None


@pytest.mark.parametrize("name", build_parser()[1])
def test_no_command_takes_the_beginning_of_a_flag_for_the_flag(name):
    whole, commands = build_parser()
    assert not whole.allow_abbrev
    assert not commands[name].allow_abbrev
