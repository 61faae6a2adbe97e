"""deploy/haproxy with the real program: it takes the file, checks by zl's ping, and obeys its runtime socket."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time

import pytest

from bench.fleet import HAPROXY_CFG, HAProxy
from bench.procs import free_port
from tests.fake_server import FakeServer
from zl.client import Client
from zl.errors import ZlError
from zl.tools.haproxy import Runtime, ServerState

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")

UP = ServerState(up=True, draining=False, maintenance=False)


def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def proxied(tmp_path):
    """Give HAProxy before a server that answers and a port where nothing is."""
    with FakeServer() as server:
        proxy = HAProxy(tmp_path, {"blue": server.address, "green": f"tcp:127.0.0.1:{free_port()}"})
        try:
            yield proxy, Runtime(proxy.runtime), server
        finally:
            proxy.stop()


def test_the_shipped_file_is_taken_without_a_warning():
    done = subprocess.run(["haproxy", "-c", "-f", str(HAPROXY_CFG)], capture_output=True, text=True, timeout=30)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "WARNING" not in said
    assert "ALERT" not in said


def test_its_check_is_a_ping(proxied):
    proxy, runtime, server = proxied
    until(lambda: not runtime.state("zl", "green").up)
    assert runtime.state("zl", "blue") == UP
    with Client(proxy.address) as client:
        assert client.ask("say x").text == "x "
    assert len(server.requests) == 1


def test_a_server_that_takes_connections_but_answers_no_ping_is_down(tmp_path):
    with FakeServer(answers_pings=False) as mute, FakeServer() as server:
        proxy = HAProxy(tmp_path, {"blue": mute.address, "green": server.address})
        try:
            runtime = Runtime(proxy.runtime)
            until(lambda: not runtime.state("zl", "blue").up)
            with Client(proxy.address) as client:
                assert client.ask("say x").text == "x "
            assert (len(mute.requests), len(server.requests)) == (0, 1)
        finally:
            proxy.stop()


def test_states_are_set_and_read_back(proxied):
    _, runtime, _ = proxied
    for state, found in (
        ("drain", ServerState(up=True, draining=True, maintenance=False)),
        ("ready", UP),
        ("maint", ServerState(up=False, draining=False, maintenance=True)),
        ("ready", UP),
    ):
        runtime.set_state("zl", "blue", state)
        until(lambda found=found: runtime.state("zl", "blue") == found)
        assert runtime.state("zl", "blue").takes_traffic == (found == UP)


def test_a_drained_server_keeps_its_connections_and_gets_no_new_one(proxied):
    proxy, runtime, server = proxied
    with Client(proxy.address) as before:
        stream = before.stream("endless")
        next(stream)
        runtime.set_state("zl", "blue", "drain")
        until(lambda: not runtime.state("zl", "green").up)
        assert [next(stream).text for _ in range(3)]
        with socket.create_connection(("127.0.0.1", proxy.port), 5) as after:
            after.settimeout(10)
            after.sendall(bytes(4))
            assert after.recv(4) == b""  # no server is left that takes it
        stream.close()
    assert len(server.requests) == 1


def test_what_haproxy_refuses_is_an_error(proxied, tmp_path):
    _, runtime, _ = proxied
    for wrong in (
        lambda: runtime.set_state("zl", "purple", "ready"),
        lambda: runtime.set_state("zl", "blue", "asleep"),
        lambda: runtime.state("zl", "purple"),
        lambda: runtime.state("nothing", "blue"),
        lambda: Runtime(f"unix:{tmp_path / 'nobody'}").state("zl", "blue"),
    ):
        with pytest.raises(ZlError, match="HAProxy"):
            wrong()
