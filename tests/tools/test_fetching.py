"""zl/tools/fetching.py and who uses it: a server that drips its bytes has one time in all."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from tests.fake_server import FakeServer
from zl.address import TcpAddress
from zl.tools import probing
from zl.tools.fetching import fetch
from zl.tools.fleet import Instance
from zl.tools.haproxy import Runtime
from zl.tools.top_scrape import ScrapeError, scrape


@pytest.fixture
def dripping():
    """A port at which each connection is told one byte after the other, so slowly that it takes half a minute."""
    over = threading.Event()

    def drip(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            for byte in b"HTTP/1.1 200 OK\r\nX: " + b"a" * 500:
                peer.send(bytes([byte]))
                if over.wait(0.05):
                    return

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=drip, args=(listener.accept()[0],)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=serve)]
        threads[0].start()
        yield listener.getsockname()[1]
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
    for each in threads:
        each.join(10)


def test_a_page_that_drips_in_is_given_up_in_time(dripping):
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        fetch("127.0.0.1", dripping, "/", 0.3)
    with pytest.raises(ScrapeError, match=r"no metrics from 127\.0\.0\.1:\d+ within 0\.3 s"):
        scrape(TcpAddress("127.0.0.1", dripping), 0.3)
    assert time.monotonic() - begun < 3


def test_a_readiness_page_that_drips_in_is_given_up_in_time(dripping, monkeypatch):
    monkeypatch.setattr(probing, "PROBE_S", 0.5)
    with FakeServer() as server:
        begun = time.monotonic()
        with pytest.raises(probing.NotReadyError, match=r"no answer from http://\S+ within 0\.5 s"):
            probing.probe(Instance("blue", server.address, ready=f"http://127.0.0.1:{dripping}/readyz?x=1"))
        assert time.monotonic() - begun < 3


def test_a_runtime_socket_that_drips_is_given_up_in_time(dripping, monkeypatch):
    monkeypatch.setattr("zl.tools.haproxy.ANSWER_S", 0.3)
    begun = time.monotonic()
    with pytest.raises(Exception, match="runtime socket"):
        Runtime(f"tcp:127.0.0.1:{dripping}").command("show info")
    assert time.monotonic() - begun < 3
