"""`zl top` as a process: on a terminal, in a pipe, once; how it ends, and what it leaves of the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest

from bench.terminal import Terminal
from tests.fake_metrics import FakeMetrics
from tests.fake_server import FakeServer

ENV = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
WAIT_S = 30


@pytest.fixture
def fake():
    with FakeMetrics() as running:
        running.set("zl_rows", 246, state="free")
        running.set("zl_rows", 10, state="live")
        yield running


def top(*arguments: str, env: dict[str, str] | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "zl", "top", *arguments], capture_output=True, text=True, check=False,
                          timeout=timeout, env=ENV | (env or {}))  # fmt: skip


class OnTerminal:
    """`zl top` on a pseudo-terminal of its own session, and what the terminal shows."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24, env: dict[str, str] | None = None):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.screen = Terminal(columns, lines)
        self.raw = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zl", "top", *arguments], stdin=self.slave, stdout=self.slave,
            stderr=subprocess.PIPE, text=True, env=ENV | {"TERM": "xterm"} | (env or {}), start_new_session=True,
            # The terminal is to be its controlling one, or Ctrl-C typed into it would signal nobody.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def read(self, seconds: float = 0.1) -> None:
        if select.select([self.master], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                # A read may end within a drawing or a character: only whole drawings are fed, each of which ends by
                # clearing what is below.
                drawn, mark, self.raw = (self.raw + os.read(self.master, 65_536)).rpartition(b"\x1b[J")
                self.screen.feed((drawn + mark).decode())

    def until(self, seen: Callable[[list[str]], bool]) -> list[str]:
        deadline = time.monotonic() + WAIT_S
        while not seen(self.screen.text()):
            assert time.monotonic() < deadline, "\n".join(self.screen.text())
            assert self.process.poll() is None, self.process.stderr.read()
            self.read()
        return self.screen.text()

    def shows(self, text: str) -> list[str]:
        return self.until(lambda lines: any(text in line for line in lines))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> tuple[int, str]:
        """Wait for its end; the terminal must be as it was before. Gives status and stderr."""
        status = self.process.wait(WAIT_S)
        for _ in range(20):
            self.read(0.05)
        self.screen.feed(self.raw.decode())
        assert not self.screen.alternate
        assert self.screen.cursor_shown
        assert termios.tcgetattr(self.slave) == self.before
        return status, self.process.stderr.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()
        os.close(self.master)
        os.close(self.slave)


def test_it_draws_again_each_interval_and_q_ends_it(fake):
    with OnTerminal("--metrics", fake.address, "--interval", "0.1") as terminal:
        lines = terminal.shows("10 of 256 busy")
        assert terminal.screen.alternate
        assert not terminal.screen.cursor_shown
        assert lines[0].startswith("zl top  ready  127.0.0.1:")
        assert lines[3] == "  " + "■" * 10 + "·" * 54
        assert {cell.style for line in terminal.screen.cells for cell in line} >= {"", "1", "2", "36"}
        fake.set("zl_rows", 200, state="live")
        fake.set("zl_rows", 56, state="free")
        terminal.shows("200 of 256 busy")
        terminal.type(b"q")
        assert terminal.end() == (0, "")


def test_ctrl_c_leaves_the_terminal_clean(fake):
    with OnTerminal("--metrics", fake.address) as terminal:
        terminal.shows("of 256 busy")
        terminal.type(b"\x03")
        assert terminal.end() == (130, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_the_terminal_clean(fake, number):
    with OnTerminal("--metrics", fake.address) as terminal:
        terminal.shows("of 256 busy")
        terminal.process.send_signal(number)
        assert terminal.end() == (128 + number, "")


def test_ctrl_z_gives_the_terminal_back_for_as_long_as_it_sleeps(fake):
    with OnTerminal("--metrics", fake.address, "--interval", "0.1") as terminal:
        terminal.shows("of 256 busy")
        # The group of a session leader is orphaned, and the kernel does not stop such a group on a terminal's Ctrl-Z:
        # see what the handler does around the stop by its output.
        terminal.process.send_signal(signal.SIGTSTP)
        deadline = time.monotonic() + WAIT_S
        seen, back = b"", b"\x1b[?25h\x1b[?1049l"
        while back not in seen:
            assert time.monotonic() < deadline
            if select.select([terminal.master], [], [], 0.1)[0]:
                seen += os.read(terminal.master, 65_536)
        terminal.process.send_signal(signal.SIGCONT)
        terminal.raw = seen.rpartition(back)[2]
        terminal.screen = Terminal(80, 24)
        terminal.shows("of 256 busy")
        assert terminal.screen.alternate
        terminal.type(b"q")
        assert terminal.end() == (0, "")


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (40, 50), (20, 10), (200, 60)])
def test_terminals_of_all_sizes(fake, columns, lines):
    """Terminal raises where something is written beyond an edge."""
    with OnTerminal("--metrics", fake.address, columns=columns, lines=lines) as terminal:
        shown = terminal.shows("zl top  ready")
        terminal.shows("256 busy"[:6] if columns > 20 else "rows")
        assert len([line for line in shown if line]) > 3
        terminal.type(b"Q")
        assert terminal.end()[0] == 0


def test_no_color_and_a_terminal_without_unicode(fake):
    env = {"NO_COLOR": "1", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    with OnTerminal("--metrics", fake.address, env=env) as terminal:
        terminal.shows("##########......")
        assert {cell.style for line in terminal.screen.cells for cell in line} == {""}
        assert all(line.isascii() for line in terminal.screen.text())
        terminal.type(b"q")
        assert terminal.end() == (0, "")


def test_a_server_that_goes_and_comes_back_is_followed(fake):
    with OnTerminal("--metrics", fake.address, "--interval", "0.1") as terminal:
        terminal.shows("zl top  ready")
        fake.status = 503
        terminal.shows("zl top  no answer")
        terminal.shows("503")
        fake.status = 200
        terminal.shows("zl top  ready")
        terminal.type(b"q")
        assert terminal.end() == (0, "")


LINE = re.compile(r"\d\d:\d\d:\d\d rows 10/256 queue 0 tokens/s \S+ glue – first p50 – p99 – gap p50 – p99 – "
                  r"pages 0/0 hits – errors 0 ready")  # fmt: skip


def test_in_a_pipe_it_prints_a_line_each_interval(fake):
    command = [sys.executable, "-m", "zl", "top", "--metrics", fake.address, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV) as process:
        lines = [process.stdout.readline().rstrip("\n") for _ in range(3)]
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert err == ""
    for line in lines + rest.splitlines():
        assert LINE.fullmatch(line), line


def test_a_reader_who_leaves_ends_it_quietly(fake):
    command = [sys.executable, "-m", "zl", "top", "--metrics", fake.address, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(WAIT_S) == 141
        assert process.stderr.read() == ""


def test_once_prints_one_view_and_ends(fake):
    done = top("--metrics", fake.address, "--once", "--interval", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    assert LINE.fullmatch(done.stdout.rstrip("\n"))
    with OnTerminal("--metrics", fake.address, "--once", "--interval", "0.1", columns=100) as terminal:
        terminal.process.wait(WAIT_S)
        terminal.read()
        assert "10 of 256 busy" in re.sub(r"\x1b\[\d+m", "", terminal.raw.decode())
        assert b"\x1b[?1049h" not in terminal.raw
    with OnTerminal("--metrics", fake.address, "--once", "--lines", "--interval", "0.1", columns=200) as terminal:
        terminal.process.wait(WAIT_S)
        terminal.read()
        assert LINE.fullmatch(terminal.raw.decode().strip())


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = done.stderr.splitlines()
    assert line.startswith("zl: ")
    assert done.stdout == ""
    return line


def test_where_no_server_is_the_error_says_what_to_do():
    done = top("--metrics", "127.0.0.1:1")
    assert done.returncode == 1
    line = one_error(done)
    assert "no metrics at 127.0.0.1:1 (Connection refused)" in line
    assert "zl serve" in line
    assert "--metrics HOST:PORT" in line


def test_what_is_no_metrics_port_of_zl_is_told(fake):
    fake.body = "# TYPE other_things gauge\nother_things 1\n"
    assert "none of zl" in one_error(top("--metrics", fake.address))
    fake.body = "<html>hello</html>"
    assert "no metrics page" in one_error(top("--metrics", fake.address))
    fake.status = 404
    assert "404" in one_error(top("--metrics", fake.address))
    with FakeServer() as frames:
        done = top("--metrics", frames.address.removeprefix("tcp:"))
        assert done.returncode == 1
        assert "metrics" in one_error(done)


def test_the_address_is_the_one_that_the_server_is_configured_with(fake, tmp_path):
    config = tmp_path / "zl.toml"
    config.write_text(f'[server]\nmetrics = "{fake.address}"\n')
    for arguments, env in (((), {"ZL_METRICS": fake.address}), (("--config", str(config)), {}),
                           (("--metrics", fake.address), {"ZL_METRICS": "off"})):  # fmt: skip
        done = top("--once", "--interval", "0.1", *arguments, env=env)
        assert done.returncode == 0, done.stderr
    done = top("--once", env={"ZL_METRICS": "off"})
    assert done.returncode == 2
    assert "metrics is off" in one_error(done)
    for wrong in (("--metrics", "9433"), ("--interval", "0")):
        assert top(*wrong).returncode == 2


def test_a_proxy_of_the_environment_is_not_asked(fake):
    done = top("--metrics", fake.address, "--once", "--interval", "0.1", env={"http_proxy": "http://127.0.0.1:1"})
    assert done.returncode == 0, done.stderr
