"""`zl hold` as processes: sockets outlive the servers behind them, and each server has one of its own as well."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zl.errors import ConfigError, ZlError
from zl.tools import hold

# Says what it was given, and answers one connection on each descriptor with the descriptor's name.
SERVER = """
import os, socket
names = os.environ["LISTEN_FDNAMES"].split(":")
assert os.environ["LISTEN_PID"] == str(os.getpid())
assert os.environ["LISTEN_FDS"] == str(len(names))
print(*names, flush=True)
for fd, name in enumerate(names, 3):
    sock = socket.socket(fileno=fd)
    sock.setblocking(True)
    peer, _ = sock.accept()
    peer.sendall(name.encode())
    peer.close()
"""


@pytest.fixture
def holder(tmp_path):
    process = zl_hold("--listen", "tcp:127.0.0.1:0", "--listen", f"unix:{tmp_path / 'front'}", "--control",
                      f"unix:{tmp_path / 'control'}")  # fmt: skip
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words[:2] == ["zl:", "holding"]
    yield int(words[2].rpartition(":")[2])
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()
    assert not list(tmp_path.glob("control")) + list(tmp_path.glob("front"))


def zl_hold(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "zl", "hold", *arguments], stdout=subprocess.PIPE, text=True)


def run_server(tmp_path: Path, own: str = "") -> subprocess.Popen[str]:
    given = ["--own", own] if own else []
    return zl_hold("--control", f"unix:{tmp_path / 'control'}", *given, "--", sys.executable, "-c", SERVER)


def said(peer: socket.socket) -> str:
    with peer:
        peer.settimeout(10)
        return peer.recv(100).decode()


def test_connections_wait_for_the_next_server_when_one_ends(tmp_path, holder):
    for _ in range(2):
        # Connected while no server is there: nothing is refused.
        over_tcp = socket.create_connection(("127.0.0.1", holder), 5)
        over_unix = socket.socket(socket.AF_UNIX)
        over_unix.connect(str(tmp_path / "front"))
        with run_server(tmp_path) as server:
            assert server.stdout.readline().split() == ["shared", "shared"]
            assert (said(over_tcp), said(over_unix)) == ("shared", "shared")
            assert server.wait(10) == 0


def test_a_server_has_an_address_of_its_own_beside_the_shared_ones(tmp_path, holder):
    own = tmp_path / "own"
    for _ in range(2):  # the second finds the first one's socket file, which nobody answers
        peers = [socket.create_connection(("127.0.0.1", holder), 5), socket.socket(socket.AF_UNIX)]
        peers[1].connect(str(tmp_path / "front"))
        with run_server(tmp_path, f"unix:{own}") as server:
            assert server.stdout.readline().split() == ["shared", "shared", "own"]
            alone = socket.socket(socket.AF_UNIX)
            alone.connect(str(own))
            assert said(alone) == "own"
            assert [said(peer) for peer in peers] == ["shared", "shared"]
            assert server.wait(10) == 0


def test_only_this_user_gets_descriptors(tmp_path, holder):
    assert stat.S_IMODE(os.stat(tmp_path / "control").st_mode) == 0o600


def test_a_stream_of_servers_takes_nothing_from_the_holder(tmp_path, holder):
    for _ in range(30):
        for sock in hold.receive(f"unix:{tmp_path / 'control'}"):
            sock.close()
    peer = socket.create_connection(("127.0.0.1", holder), 5)
    peer.close()


def test_what_is_wrong_is_said_in_one_line(tmp_path):
    with pytest.raises(ZlError, match="no holder answers"):
        hold.receive(f"unix:{tmp_path / 'nobody'}")
    with pytest.raises(ConfigError, match="unix:PATH"):
        hold.receive("tcp:127.0.0.1:1")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        child = subprocess.Popen([sys.executable, "-c", "import socket, sys\ns = socket.socket(fileno=0)\ns.accept()"],
                                 stdin=other)  # fmt: skip
        with pytest.raises(ZlError, match="no holder"):
            hold.receive(f"unix:{tmp_path / 'other'}")
        child.wait(10)
    for arguments in (["--control", "unix:/x"], ["--control", "unix:/x", "--listen", "unix:/y", "--", "true"]):
        process = zl_hold(*arguments)
        assert process.communicate(timeout=20)[0] == ""
        assert process.returncode == 2


def test_the_holder_ends_well_on_sigint_too(tmp_path):
    with zl_hold("--listen", f"unix:{tmp_path / 'a'}", "--control", f"unix:{tmp_path / 'c'}") as process:
        assert process.stdout.readline().startswith("zl: holding")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
