"""Listening: every kind of socket, and every failure in one line that says what to do."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import select
import socket
import subprocess
import sys

import pytest

from tests.net.harness import App, Peer, run, serving
from zl.address import TcpAddress, UnixAddress, parse_address
from zl.errors import ConfigError, ZlError
from zl.gpu.arena import Arena
from zl.net.connections import Net
from zl.net.listen import BACKLOG, Bound, bind, bind_all, listen, systemd_sockets, unbind

both_loops = pytest.mark.parametrize("kind", ["uvloop", "asyncio"])


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert text
    return text


@both_loops
def test_several_listeners_serve_at_once_and_close(tmp_path, kind):
    async def main() -> None:
        paths = [str(tmp_path / name) for name in ("a", "b")]
        arena = Arena(2)
        net = Net(loop=asyncio.get_running_loop(), app=App(), arena=arena)
        bounds = bind_all(
            [parse_address("tcp:127.0.0.1:0", port_zero=True), TcpAddress("127.0.0.1", 0), *map(UnixAddress, paths)]
        )
        listeners = await listen(bounds, net.connection)
        ports = [bound.sock.getsockname()[1] for bound in bounds[:2]]
        assert listeners.names == [*(f"tcp:127.0.0.1:{port}" for port in ports), *(f"unix:{path}" for path in paths)]
        opened = [await asyncio.open_connection("127.0.0.1", port) for port in ports]
        opened += [await asyncio.open_unix_connection(path) for path in paths]
        peers = [Peer(*streams) for streams in opened]
        for peer in peers:
            await peer.ping()
        listeners.close()
        assert os.listdir(tmp_path) == []
        await peers[0].ping()  # accepted connections live on
        for peer in peers:
            await peer.close()
        while net.connections:
            await asyncio.sleep(0.001)
        net.close()
        arena.close()

    run(main(), kind)


@both_loops
def test_accepted_tcp_sockets_do_not_delay_small_frames(tmp_path, kind):
    async def main() -> None:
        async with serving(tmp_path) as served:
            peer = await served.peer()
            await peer.ping()
            (conn,) = served.net.connections
            sock = conn._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(main(), kind)


def test_a_port_in_use_says_so_and_nothing_stays_open(tmp_path):
    taken = bind(TcpAddress("127.0.0.1", 0))
    port = taken.sock.getsockname()[1]
    path = str(tmp_path / "s")
    with pytest.raises(ZlError) as caught:
        bind_all([UnixAddress(path), TcpAddress("127.0.0.1", port)])
    assert one_line(caught.value).startswith(f"tcp:127.0.0.1:{port}: already in use; stop")
    assert not os.path.exists(path)
    unbind(taken)


def test_a_stale_socket_file_is_replaced_and_an_answered_one_is_not(tmp_path):
    address = UnixAddress(str(tmp_path / "s"))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(address.path)
    assert os.path.exists(address.path)
    bound = bind(address)
    with pytest.raises(ZlError, match="already in use"):
        bind(address)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address.path)  # the live one was not harmed
    unbind(bound)
    assert not os.path.exists(address.path)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ZlError, match="no socket"):
        bind(UnixAddress(str(path)))
    assert path.read_text() == "data"


def test_a_missing_folder_and_an_unknown_host_say_so(tmp_path):
    with pytest.raises(ZlError) as caught:
        bind(UnixAddress(str(tmp_path / "none" / "s")))
    assert "its folder does not exist" in one_line(caught.value)
    with pytest.raises(ConfigError) as caught:
        bind(TcpAddress("no such host", 1))
    assert "'no such host' is not known" in one_line(caught.value)
    with pytest.raises(ZlError) as caught:
        bind(TcpAddress("192.0.2.1", 1))  # TEST-NET-1, RFC 5737: nobody's
    assert "no such address" in one_line(caught.value)


def test_permission_denied_says_what_to_take_instead(tmp_path, monkeypatch):
    def refuse(self, where):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    cases = ((TcpAddress("127.0.0.1", 80), "below 1024"), (UnixAddress(str(tmp_path / "s")), "may write"))
    for address, remedy in cases:
        with pytest.raises(ZlError) as caught:
            bind(address)
        assert "permission denied" in one_line(caught.value)
        assert remedy in one_line(caught.value)


def test_ipv6_stands_beside_ipv4():
    try:
        six = bind(TcpAddress("::1", 0))
    except ZlError as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert six.name.startswith("tcp:[::1]:")
    unbind(six)


# --- systemd ----------------------------------------------------------------------------------------------------------

CHILD = """
import os, socket, sys
from zl.net.listen import systemd_sockets
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": sys.argv[1], "LISTEN_FDNAMES": sys.argv[2]}
try:
    for bound in systemd_sockets(environ, os.getpid()):
        print(bound.name, bound.sock.fileno(), os.get_inheritable(bound.sock.fileno()), bound.owned_path == "")
        bound.sock.detach()
except Exception as error:
    print(type(error).__name__, error)
"""


def child(fd: int, count: str, names: str) -> str:
    """Run a process whose descriptor 3 is `fd`, as systemd does it."""
    call = [sys.executable, "-W", "error", "-c", CHILD, count, names]
    command = ["bash", "-c", f'exec "$@" 3<&{fd}', "bash", *call]
    return subprocess.run(command, pass_fds=[fd], capture_output=True, text=True, check=True).stdout.strip()


def test_sockets_from_systemd_are_taken_over_by_name():
    bound = bind(TcpAddress("127.0.0.1", 0))
    assert child(bound.sock.fileno(), "1", "wire") == f"systemd:wire ({bound.name}) 3 False True"
    assert child(bound.sock.fileno(), "1", "") == f"systemd:fd 3 ({bound.name}) 3 False True"
    assert child(bound.sock.fileno(), "1", "unknown") == f"systemd:fd 3 ({bound.name}) 3 False True"
    unbind(bound)


def test_what_systemd_passes_must_listen():
    with socket.socket() as idle:
        assert "not a listening stream; use ListenStream=" in child(idle.fileno(), "1", "wire")
    with open(os.devnull) as file:
        assert "descriptor 3 is no socket" in child(file.fileno(), "1", "wire")


def test_variables_meant_for_another_process_are_ignored():
    assert systemd_sockets({"LISTEN_FDS": "1", "LISTEN_PID": "1"}, 2) == []
    assert systemd_sockets({}, 2) == []
    with pytest.raises(ConfigError, match="LISTEN_FDS"):
        systemd_sockets({"LISTEN_FDS": "two", "LISTEN_PID": "2"}, 2)


@both_loops
def test_a_unix_socket_that_is_not_ours_keeps_its_file(tmp_path, kind):
    async def main() -> None:
        path = str(tmp_path / "s")
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        listeners = await listen([Bound(sock, "systemd:s")], asyncio.Protocol)
        listeners.close()
        assert os.path.exists(path)
        await asyncio.sleep(0)

    run(main(), kind)


@both_loops
@pytest.mark.parametrize("held", [False, True])
def test_whom_the_kernel_has_connected_is_accepted_unless_others_hold_the_socket(tmp_path, kind, held):
    async def main() -> None:
        arena = Arena(1)
        net = Net(loop=asyncio.get_running_loop(), app=App(accepting=False), arena=arena)
        bounds = bind_all([TcpAddress("127.0.0.1", 0), UnixAddress(str(tmp_path / "s"))])
        where = [bound.sock.getsockname() for bound in bounds]
        keepers = [bound.sock.dup() for bound in bounds] if held else []
        bounds = [dataclasses.replace(bound, held=held) for bound in bounds]
        listeners = await listen(bounds, net.connection)
        waiting = [socket.socket(bound.sock.family) for bound in bounds for _ in range(20)]
        for i, sock in enumerate(waiting):
            sock.connect(where[i // 20])
        await listeners.finish(5.0)
        await asyncio.sleep(0.01)
        assert len(net.connections) == (0 if held else 40)
        if held:
            assert all(select.select([keeper], [], [], 0)[0] for keeper in keepers)  # for the next server
        else:
            assert not os.path.exists(tmp_path / "s")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(where[0])
        for sock in [*waiting, *keepers]:
            sock.close()
        while net.connections:
            await asyncio.sleep(0.001)
        net.close()
        arena.close()

    run(main(), kind)


def test_the_file_of_another_server_is_not_removed(tmp_path):
    path = str(tmp_path / "s")
    mine = bind(UnixAddress(path))
    os.unlink(path)  # somebody makes room
    theirs = bind(UnixAddress(path))
    unbind(mine)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
    unbind(theirs)
    assert not os.path.exists(path)
