"""Socket activation with systemd's own tool, and a socket that is held while servers come and go."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bench.procs import free_port
from tests.ops.kit import ROOT, Manager
from zl.client import Client, Draining
from zl.net.listen import BACKLOG

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

COLD_START_S = 8.0

# Puts an inherited socket where systemd puts it and says so, then becomes the server: LISTEN_PID is the server's.
BECOME = """
import fcntl, os, sys
fds = [int(fd) for fd in sys.argv[1].split(",")]
saved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in fds]
for place, fd in enumerate(saved, 3):
    os.dup2(fd, place)
for fd in set(fds) - set(range(3, 3 + len(fds))):
    os.close(fd)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=sys.argv[2])
os.execv(sys.executable, [sys.executable, "-m", "zl", "serve", *sys.argv[3:]])
"""


def listening(family: int, where: tuple[str, int] | str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind(where)
    sock.listen(BACKLOG)
    return sock


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="no systemd-socket-activate here")
def test_systemds_own_tool_starts_a_server_that_serves(tmp_path, small):
    port, path = free_port(), str(tmp_path / "s")
    log = tmp_path / "log"
    manager = Manager(f"@zl-activate-{os.getpid()}")
    env = os.environ | {"PYTHONPATH": str(ROOT), "ZL_METRICS": "off", "NOTIFY_SOCKET": manager.address}
    passed = ("PYTHONPATH", "ZL_METRICS", "NOTIFY_SOCKET", "HOME", "XDG_CACHE_HOME")
    command = [
        "systemd-socket-activate", "-l", f"127.0.0.1:{port}", "-l", path, "--fdname", "wire:local",
        *(f"--setenv={name}" for name in env if name in passed),
        sys.executable, "-m", "zl", "serve", *small,
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
    try:
        deadline = time.monotonic() + 20
        while "Listening on" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        # The connection is what starts the server; it waits in the socket until the server is ready.
        with Client(f"tcp:127.0.0.1:{port}", timeout=60) as client:
            assert client.ask("Hi", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
        with Client(f"unix:{path}", timeout=60) as client:
            assert client.ask("Hi", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        names = f"systemd:wire (tcp:127.0.0.1:{port}) and systemd:local (unix:{path})"
        assert f"zl: listening on {names}" in log.read_text()
        assert names in manager.said("READY")[0].fields["STATUS"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
        assert os.path.exists(path)  # whose socket it is removes it
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        manager.close()


class Knocker(threading.Thread):
    """Connects, asks, hangs up, again and again; counts what was answered, turned away and lost."""

    def __init__(self, address: str):
        super().__init__(daemon=True)
        self.address = address
        self.stop = threading.Event()
        self.answered = self.turned_away = 0
        self.longest_s = 0.0
        self.lost: list[BaseException] = []
        self.start()

    def run(self) -> None:
        while not self.stop.is_set():
            begun = time.monotonic()
            try:
                with Client(self.address, timeout=60) as client:
                    client.ask("Hi", max_tokens=4, ignore_eos=True)
                self.answered += 1
            except Draining:
                self.turned_away += 1  # it was connected before the drain began: the server said to come again
            except Exception as failure:
                self.lost.append(failure)
            self.longest_s = max(self.longest_s, time.monotonic() - begun)


def test_a_restart_loses_no_connection_attempt_while_the_socket_is_held(service, tmp_path, small, tell):
    tcp = listening(socket.AF_INET, ("127.0.0.1", 0))
    unix = listening(socket.AF_UNIX, str(tmp_path / "s"))
    with tcp, unix:
        restart_under_load(service, tmp_path, small, tcp, unix, tell)


def restart_under_load(service, tmp_path, small, tcp: socket.socket, unix: socket.socket, tell) -> None:
    fds = (tcp.fileno(), unix.fileno())

    def start(number: int):
        command = [sys.executable, "-c", BECOME, ",".join(map(str, fds)), "wire:local", *small]
        return service(tmp_path / f"run{number}", instead=command, pass_fds=fds).ready()

    server = start(0)
    addresses = [f"tcp:127.0.0.1:{tcp.getsockname()[1]}", f"unix:{tmp_path / 's'}"]
    knockers = [Knocker(address) for address in addresses for _ in range(4)]
    restarts = 3
    for number in range(1, restarts + 1):
        time.sleep(0.4)
        assert server.close() == 0, server.text()
        server = start(number)
    time.sleep(0.4)
    for each in knockers:
        each.stop.set()
    for each in knockers:
        each.join(60)
    answered = sum(each.answered for each in knockers)
    turned_away = sum(each.turned_away for each in knockers)
    lost = [failure for each in knockers for failure in each.lost]
    longest_s = max(each.longest_s for each in knockers)
    tell(f"held socket, {restarts} restarts: {answered} answered, {turned_away} told to come again, "
         f"{len(lost)} lost, longest wait {longest_s:.1f} s")  # fmt: skip
    assert not lost, lost[:3]
    assert answered > 50
    assert server.close() == 0


def test_cold_start_of_a_built_model_within_8_s_to_ready(service, tmp_path, gguf_path, tell):
    flags = ("--model", str(gguf_path), "--listen", f"unix:{tmp_path / 's'}")
    first = service(tmp_path / "first", *flags).ready()  # builds, where no test before has
    assert first.close() == 0
    begun = time.monotonic()
    server = service(tmp_path / "again", *flags).ready()
    seconds = server.manager.said("READY")[0].at - begun
    words = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    cpu_seconds = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, proc(5)
    tell(f"cold start from a built artifact: READY after {seconds:.2f} s, {cpu_seconds:.2f} s of CPU time")
    assert "no artifact" not in server.text()
    assert "making an artifact" not in server.text()
    # A start waits for nothing but its cores: on a busy machine the clock would show the neighbours.
    assert cpu_seconds < COLD_START_S
    assert server.close() == 0
