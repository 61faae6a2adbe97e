"""zl/client/aio.py: how a connection ends, by the client, the server or neither; sync.py where it has the same."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time

import pytest

from tests.client.kit import run, until
from tests.fake_server import FakeServer
from zl.client import AsyncClient, Client, ConnectionFailed, StreamBroken
from zl.net.codec import encode_tokens


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(10)
        yield sock


def address_of(sock):
    return f"tcp:127.0.0.1:{sock.getsockname()[1]}"


def accepted(sock):
    peer, _ = sock.accept()
    peer.settimeout(10)
    return peer


def test_a_client_whose_closing_is_cancelled_keeps_no_connection():
    async def main():
        for steps in range(4):
            with FakeServer() as server:
                client = await AsyncClient(server.address)
                assert (await client.ask("say x")).text == "x "
                closing = asyncio.create_task(client.close())
                for _ in range(steps):
                    await asyncio.sleep(0)
                closing.cancel()
                await asyncio.wait([closing])
                if steps:
                    await until(server.closed.is_set)
                await client.close()

    run(main())


def test_a_client_that_is_closed_while_it_connects_keeps_no_connection(listening, monkeypatch):
    async def main():
        connected, go = asyncio.Event(), asyncio.Event()

        async def slowly(*what):
            found = await open_transport(*what)
            connected.set()
            await go.wait()
            return found

        from zl.client import aio

        open_transport = aio.open_transport
        monkeypatch.setattr(aio, "open_transport", slowly)
        client = AsyncClient(address_of(listening))
        connecting = asyncio.create_task(client.connect())
        await connected.wait()
        with accepted(listening) as peer:
            await client.close()
            go.set()
            with pytest.raises(ConnectionFailed, match="client was closed"):
                await connecting
            assert await asyncio.to_thread(peer.recv, 1) == b""

    run(main())


def test_a_client_that_was_closed_does_not_connect_again(listening):
    async def main():
        client = AsyncClient(address_of(listening))
        await client.connect()
        await client.close()
        for again in (client, AsyncClient(address_of(listening))):
            await again.close()
            with pytest.raises(ConnectionFailed, match="client was closed"):
                await again.connect()
        with accepted(listening):
            listening.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listening.accept()  # nobody else knocked

    run(main())


def test_closing_does_not_wait_for_a_server_that_does_not_read(listening):
    async def main():
        client = await AsyncClient(address_of(listening))
        with accepted(listening):
            streams = [client.stream("x" * 3_000_000) for _ in range(8)]
            await asyncio.wait_for(client.close(), 5)
            for stream in streams:
                with pytest.raises(StreamBroken, match="this client was closed"):
                    await anext(stream)

    run(main())


def test_a_stream_that_another_task_closes_ends_for_its_reader():
    async def main():
        with FakeServer() as server:
            async with AsyncClient(server.address) as client:
                stream = client.stream("silent")

                async def read():
                    return [chunk async for chunk in stream]

                reader = asyncio.create_task(read())
                await until(lambda: server.requests)
                client._wire.cancel = lambda _: b""  # so that no last frame comes
                await stream.close()
                assert await asyncio.wait_for(reader, 5) == []

    run(main())


@pytest.mark.parametrize("busy", [False, True])
def test_a_server_that_ends_the_connection_does_not_wait_for_the_clients_end(busy, listening):
    async def main():
        client = await AsyncClient(address_of(listening))
        with accepted(listening) as peer:
            asking = asyncio.create_task(client.ask("x"))
            assert await asyncio.to_thread(peer.recv, 65_536)
            peer.sendall(encode_tokens(1, [1], b"one ", None, 1))
            if not busy:
                asking.cancel()
                await asyncio.wait([asking])
                assert await asyncio.to_thread(peer.recv, 65_536)  # the cancel
            peer.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(peer.recv, 1) == b""
            if busy:
                with pytest.raises(StreamBroken):
                    await asking
            assert client.closed == "the server closed the connection"
            await client.close()

    run(main())


def test_a_server_that_ends_the_connection_does_not_wait_for_a_client_that_reads(listening):
    with Client(address_of(listening)) as client, accepted(listening) as peer:
        stream = client.stream("x")
        assert peer.recv(65_536)
        peer.sendall(encode_tokens(1, [1], b"one ", None, 1))
        peer.shutdown(socket.SHUT_WR)
        assert next(stream).text == "one "
        with pytest.raises(StreamBroken):
            next(stream)
        assert peer.recv(1) == b""


def test_a_server_that_talks_nonsense_sees_the_clients_end(listening):
    async def main():
        client = await AsyncClient(address_of(listening))
        with accepted(listening) as peer:
            peer.sendall(b"\xff\xff\xff\xff")
            assert await asyncio.to_thread(peer.recv, 1) == b""
            assert "does not speak zl's protocol" in client.closed
            await client.close()

    run(main())
    with Client(address_of(listening)) as client, accepted(listening) as peer:
        peer.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ConnectionFailed, match="does not speak zl's protocol"):
            client.ping()
        while peer.recv(65_536):
            pass


def test_nothing_is_written_to_a_connection_that_has_broken(listening, caplog):
    async def main():
        client = await AsyncClient(address_of(listening), timeout=0.5)
        peer = accepted(listening)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()  # which resets it
        time.sleep(0.05)  # the loop does not know it yet
        streams = [client.stream("say x") for _ in range(20)]
        for stream in streams:
            with pytest.raises((StreamBroken, ConnectionFailed)):
                await anext(stream)
        await client.close()

    run(main())
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_thread_that_leaves_does_not_hide_the_servers_end(listening):
    """`close` in one thread while another reads: what the other hears is that the client was closed."""
    for _ in range(20):
        client = Client(address_of(listening))
        with accepted(listening) as peer:
            stream = client.stream("x")
            found = []

            def read(stream=stream, found=found):
                with contextlib.suppress(StreamBroken):
                    next(stream)
                found.append(stream._client.closed)

            reader = threading.Thread(target=read)
            reader.start()
            assert peer.recv(65_536)
            client.close()
            reader.join(10)
            assert found == ["this client was closed"]
