"""zl/cli/numbers.py, through the flags of the commands: what is refused, and in which words."""

from __future__ import annotations

import argparse
import math

import pytest

from zl.cli import main
from zl.cli.numbers import above_zero, count, seconds

WAITS = "must be a number of seconds above 0, such as 2.5, or inf for ever"


@pytest.mark.parametrize("value", ["nan", "-3", "0", "-inf", "soon"])
@pytest.mark.parametrize("line", ["nc unix:/x --timeout", "ask hi --timeout", "chat --timeout", "load --timeout"])
def test_a_time_to_wait_is_above_zero(line, value, capsys):
    said = refused(f"{line}={value}", capsys)
    assert f"argument --timeout: {value!r} {WAITS}" in said


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        *((f"--{name}={value}", "must be a number above 0") for name in ("rate", "seconds") for value in
          ("0", "-1", "nan", "inf", "x")),
        *((f"--{name}={value}", "must be a whole number of at least 1") for name in
          ("streams", "tokens", "per-stream", "words", "server-pid") for value in ("0", "-1", "1.5", "nan")),
        *((f"--{name}={value}", "must be a whole number of at least 0") for name in
          ("idle", "connections", "shared-words", "long-words") for value in ("-1", "x")),
    ],
)  # fmt: skip
def test_load_takes_no_number_that_cannot_be(flag, words, capsys):
    assert words in refused(f"load --echo --scenario poisson {flag}", capsys)


def test_dissect_wants_limits_that_something_fits_in(capsys):
    assert "must be a whole number from 1 to 4,294,967,295" in refused("dissect --max-frame=-1 -", capsys)
    assert "must be a whole number of at least 1" in refused("dissect --vocab-size=0 -", capsys)


def test_what_can_be_is_taken():
    assert (seconds("0.5"), seconds("inf"), above_zero("1e3"), count(0)("0"), count(1, 3)("3")) == (
        0.5, math.inf, 1000.0, 0, 3)  # fmt: skip
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 3"):
        count(1, 3)("4")


def refused(line: str, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    return capsys.readouterr().err
