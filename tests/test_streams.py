"""zl/streams.py: standard streams that are closed, full or left by their reader, under whole commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fake_metrics import FakeMetrics
from tests.fake_server import FakeServer

ENV = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
CLOSED = "zl: standard output is closed: there is nowhere to print to; to print nothing, write >/dev/null\n"
FULL = "zl: standard output cannot be written: No space left on device\n"


def shell(line: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line in which `zl` is the command; its status is zl's also before a pipe."""
    zl = f"{sys.executable} -m zl"
    return subprocess.run(["bash", "-c", f"set -o pipefail; zl() {{ {zl} \"$@\"; }}; {line}"], capture_output=True,
                          text=True, timeout=60, check=False, env=ENV | env, errors="replace")  # fmt: skip


@pytest.fixture(scope="module")
def commands():
    with FakeServer() as server, FakeMetrics() as metrics:
        yield {
            "ask": f"zl ask 'say a b' --connect {server.address}",
            "doctor": "zl doctor",
            "frame": "zl frame Hi",
            "dissect": "printf '\\0\\0\\0\\0' | zl dissect -q -",
            "load": "zl load --echo --streams 2 --tokens 3",
            "top": f"zl top --once --interval 0.1 --metrics {metrics.address}",
            "nc": f"zl nc {server.address} <(zl frame 'say a b')",
            "nc-json": f"zl nc {server.address} --output json <(zl frame 'say a b')",
            "nc-raw": f"zl nc {server.address} --output raw <(zl frame 'say a b')",
            "help": "zl --help",
        }


NAMES = ("ask", "doctor", "frame", "dissect", "load", "top", "nc", "nc-json", "nc-raw")


@pytest.mark.parametrize("name", NAMES)
def test_a_command_that_prints_says_that_its_output_is_closed(commands, name):
    done = shell(f"{commands[name]} >&-")
    assert (done.returncode, done.stderr) == (2, CLOSED)


@pytest.mark.parametrize("name", [*NAMES, "help"])
def test_a_full_disk_is_one_line_and_a_reader_who_leaves_none(commands, name):
    for env in ({}, {"PYTHONUNBUFFERED": "1"})[: 1 + (name in ("frame", "help"))]:
        full = shell(f"{commands[name]} >/dev/full", **env)
        assert (full.returncode, full.stderr) == (1, FULL)
    left = shell(f"{commands[name]} | true")
    if (left.returncode, left.stderr) != (0, ""):  # `true` may be slower than what is printed
        assert (left.returncode, left.stderr) == (141, "")


@pytest.mark.parametrize("name", [*NAMES, "help"])
def test_a_standard_error_that_is_gone_changes_nothing(commands, name):
    done = shell(f"{commands[name]} 2>&-")
    assert (done.returncode, bool(done.stdout)) == (0, True)


def test_what_is_for_standard_error_does_not_come_on_standard_output(commands):
    for redirect in ("2>&-", "2>/dev/full"):
        done = shell(f"{commands['ask']} {redirect}")
        assert (done.returncode, done.stdout) == (0, "a b \n")
        done = shell(f"zl ask hi --connect unix:/nonexistent {redirect}")
        assert (done.returncode, done.stdout) == (1, "")
    assert shell(f"{commands['ask']} --stats 2>&-").stdout == "a b \n"


@pytest.mark.parametrize(
    "line", ["zl ask -", "zl chat", "zl frame --json", "zl frame --proto", "zl dissect -", "zl nc unix:/x"]
)
def test_a_command_that_reads_says_that_its_input_is_closed(line):
    done = shell(f"{line} <&-")
    assert (done.returncode, done.stderr) == (
        2, "zl: standard input is closed: name what to read, or give it something to read\n")  # fmt: skip


def test_what_is_opened_never_takes_the_place_of_a_closed_stream():
    code = ("from zl.streams import occupy; occupy(); import socket, os; "
            "s = socket.socket(); os.write(9, str(s.fileno()).encode())")  # fmt: skip
    done = subprocess.run(["bash", "-c", f"exec 9>&1; exec {sys.executable} -c \"{code}\" <&- >&- 2>&-"],
                          capture_output=True, text=True, timeout=60, check=False, env=ENV)  # fmt: skip
    assert int(done.stdout) > 2


def test_a_teller_goes_on_where_the_reader_has_left():
    code = ("from zl.streams import Teller, lost, occupy; occupy(); tell = Teller(); "
            "[tell(f'line {i}') for i in range(3)]; import sys; sys.exit(len(lost()))")  # fmt: skip
    run = f"{sys.executable} -c \"{code}\""
    done = shell(f"{run} >/dev/full")
    assert (done.returncode, done.stderr.splitlines()) == (
        0, [f"{FULL.strip()}: the rest is told here", "line 0", "line 1", "line 2"])  # fmt: skip
    assert shell(f"{run} >/dev/full 2>/dev/full").returncode == 0
    assert shell(run).stdout.splitlines() == ["line 0", "line 1", "line 2"]
