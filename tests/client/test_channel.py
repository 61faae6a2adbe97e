"""zl/client/channel.py and aio_channel.py: who is asked for TLS after an end without a word, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.certificates import make
from tests.client.kit import Clock, run, until
from tests.fake_server import FakeServer
from zl.client import AsyncClient, AsyncPool, Client, ConnectionFailed, Pool, StreamBroken, TlsFailed, ZlClientError
from zl.errors import Finish
from zl.net.codec import Usage, encode_last

both = pytest.mark.parametrize("kind", ["sync", "asyncio"])


@pytest.fixture
def patient(monkeypatch):
    """Whoever waits for an answer about TLS for as long as it may is noticed."""
    for name in ("zl.client.endpoints.ASK_TLS_S", "zl.client.channel.ASK_TLS_S"):
        monkeypatch.setattr(name, 60.0)


class Leaving:
    """A server that ends its first connection without a word; its socket is held, and nobody accepts any more."""

    def __init__(self):
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(10)
        self.address = f"tcp:127.0.0.1:{self.listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def _serve(self):
        with self.listening.accept()[0] as peer:
            peer.settimeout(10)
            peer.recv(65_536)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.listening.close()
        self._thread.join(10)

    def heard_next(self):
        """What the next connection said, which may be none."""
        self.listening.settimeout(0.2)
        with self.listening.accept()[0] as peer:
            peer.settimeout(10)
            return peer.recv(65_536)


def once(kind, address, timeout, **options):
    async def ask():
        async with AsyncClient(address, timeout=timeout) as client:
            await client.ask("x", **options)

    if kind == "asyncio":
        return run(ask())
    with Client(address, timeout=timeout) as client:
        return client.ask("x", **options)


@both
@pytest.mark.parametrize(("timeout", "options"), [(0.4, {}), (None, {"deadline_ms": 400})])
def test_asking_takes_no_longer_than_the_caller_waits(kind, timeout, options, patient):
    with Leaving() as server:
        start = time.monotonic()
        with pytest.raises(StreamBroken, match=r"without a word.*must be called tls:"):
            once(kind, server.address, timeout, **options)
        assert time.monotonic() - start < 10
        assert server.heard_next()[:2] == b"\x16\x03"


def test_asyncio_a_connection_that_has_ended_takes_nothing_new_while_the_server_is_asked(patient):
    async def main(server):
        async with AsyncClient(server.address, timeout=120) as client:
            asking = asyncio.create_task(client.ask("x"))
            await until(lambda: client.closed)
            for call in (client.ask, client.ping, client.hello):
                with pytest.raises(ConnectionFailed, match="without a word"):
                    await (call("y") if call == client.ask else call())
            assert not asking.done()
        with pytest.raises(StreamBroken, match="without a word"):
            await asking

    with Leaving() as server:
        run(main(server))


def test_a_connection_that_has_ended_takes_nothing_new_while_the_server_is_asked(patient):
    with Leaving() as server, ThreadPoolExecutor(1) as thread:
        client = Client(server.address, timeout=120)
        asking = thread.submit(client.ask, "x")
        for _ in range(5_000):
            if client.closed:
                break
            threading.Event().wait(0.002)
        for call in (client.ask, client.ping, client.hello):
            with pytest.raises(ConnectionFailed, match="without a word"):
                call("y") if call == client.ask else call()
        assert not asking.done()
        client.close()  # which waits for nobody
        assert not asking.done()
        server.listening.close()  # the end of the asking: nobody will answer
        with pytest.raises(StreamBroken, match="without a word"):
            asking.result(10)


@both
def test_where_zl_has_answered_nobody_is_asked_for_tls(kind):
    heard: list[bytes] = []

    def serve(listening):
        with contextlib.suppress(OSError):  # the test has closed it
            while True:
                with listening.accept()[0] as peer:
                    peer.settimeout(10)
                    heard.append(peer.recv(65_536))
                    if len(heard) == 1:
                        peer.sendall(encode_last(1, [1], b"x", None, Finish.STOP, Usage()))

    clock = Clock()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        address = f"tcp:127.0.0.1:{listening.getsockname()[1]}"

        async def main():
            async with AsyncPool(address, clock=clock, sleep=clock.sleep_async) as pool:
                assert (await pool.ask("x")).text == "x"
                with pytest.raises(ZlClientError):
                    await pool.ask("y")

        if kind == "asyncio":
            run(main())
        else:
            with Pool(address, clock=clock, sleep=clock.sleep) as pool:
                assert pool.ask("x").text == "x"
                with pytest.raises(ZlClientError):
                    pool.ask("y")
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert len(heard) > 2
    assert {each[:2] for each in heard} == {b"\0\0"}


@both
def test_each_of_many_requests_hears_that_the_server_speaks_tls(kind, tmp_path):
    with FakeServer(tls=make(tmp_path, "here").context()) as server:
        address = server.address.replace("tls:", "tcp:")

        async def main():
            async with AsyncPool(address) as pool:
                found = [asyncio.create_task(pool.ask("x"))]
                for _ in range(30):
                    await asyncio.sleep(0.001)
                    found.append(asyncio.create_task(pool.ask("x")))
                return await asyncio.gather(*found, return_exceptions=True)

        def ask(pool, seconds):
            threading.Event().wait(seconds)
            with pytest.raises(ZlClientError) as caught:
                pool.ask("x")
            return caught.value

        if kind == "asyncio":
            errors = run(main())
        else:
            with Pool(address) as pool, ThreadPoolExecutor(31) as threads:
                errors = list(threads.map(lambda i: ask(pool, i / 1_000), range(31)))
        assert {type(each) for each in errors} == {TlsFailed}
