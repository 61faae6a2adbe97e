"""Facts about uvloop that zl/net/protocol.py is built on; when one changes, the design may change too."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from tests.net.harness import run


async def connected(protocol: asyncio.BaseProtocol) -> tuple[asyncio.Transport, socket.socket]:
    """Join a protocol to a plain non-blocking socket."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, ours)
    return transport, theirs  # type: ignore[return-value]


class Buffered(asyncio.BufferedProtocol):
    def __init__(self, size: int = 64) -> None:
        self.view = memoryview(bytearray(size))
        self.n = 0
        self.lost = asyncio.Event()
        self.error: BaseException | None = None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.view[self.n :]

    def buffer_updated(self, nbytes: int) -> None:
        self.n += nbytes

    def connection_lost(self, exc: BaseException | None) -> None:
        self.error = exc
        self.lost.set()


class Both(Buffered, asyncio.Protocol):
    def __init__(self) -> None:
        super().__init__()
        self.copied = b""

    def data_received(self, data: bytes) -> None:
        self.copied += data


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_protocol_of_both_kinds_is_copied_to():
    async def main() -> None:
        protocol = Both()
        transport, peer = await connected(protocol)
        with peer:
            peer.send(b"hello")
            await until(lambda: protocol.copied or protocol.n)
            assert (protocol.copied, protocol.n) == (b"hello", 0)
            transport.abort()
            await protocol.lost.wait()

    run(main(), "uvloop")


@pytest.mark.parametrize("kind", ["uvloop", "asyncio"])
def test_an_empty_view_kills_the_connection(kind):
    async def main() -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        protocol = Buffered(5)
        _, peer = await connected(protocol)
        with peer:
            peer.send(b"hello")
            await until(lambda: protocol.n == 5)
            with contextlib.suppress(BrokenPipeError):
                peer.send(b"more")
            await protocol.lost.wait()
            assert isinstance(protocol.error, RuntimeError)
        assert reported

    run(main(), kind)


@pytest.mark.parametrize("kind", ["uvloop", "asyncio"])
def test_while_paused_no_buffer_is_asked_for_and_nothing_is_lost(kind):
    class Pausing(Buffered):
        asked = 0

        def get_buffer(self, sizehint: int) -> memoryview:
            assert not self.paused
            self.asked += 1
            return super().get_buffer(sizehint)[:4]

        paused = False

        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            if self.n == 4:
                self.paused = True
                transports[0].pause_reading()

    transports: list[asyncio.Transport] = []

    async def main() -> None:
        protocol = Pausing()
        transport, peer = await connected(protocol)
        transports.append(transport)
        with peer:
            peer.send(b"headpayload")
            await until(lambda: protocol.paused)
            asked = protocol.asked
            for _ in range(5):
                await asyncio.sleep(0.001)
            assert (protocol.asked, protocol.n) == (asked, 4)
            protocol.paused = False
            transport.resume_reading()
            await until(lambda: protocol.n == 11)
            assert bytes(protocol.view[:11]) == b"headpayload"
            transport.abort()
            await protocol.lost.wait()

    run(main(), kind)


def test_a_memoryview_given_to_write_is_not_copied():
    async def main() -> None:
        protocol = Buffered()
        transport, peer = await connected(protocol)
        with peer:
            fill = b"a" * 4_000_000  # more than the socket holds: what follows waits in uvloop
            data = bytearray(b"b" * 1000)
            transport.write(fill)
            transport.write(memoryview(data))
            await asyncio.sleep(0)
            data[:] = b"c" * 1000
            received = b""
            loop = asyncio.get_running_loop()
            while len(received) < len(fill) + 1000:
                received += await loop.sock_recv(peer, 1 << 20)
            assert received[-1000:] == b"c" * 1000
            transport.abort()
            await protocol.lost.wait()

    run(main(), "uvloop")


def test_each_write_is_a_system_call_of_its_own_and_what_the_socket_does_not_take_is_counted():
    async def main() -> None:
        protocol = Buffered()
        transport, peer = await connected(protocol)
        with peer:
            transport.write(b"x" * 1000)
            assert len(peer.recv(2000)) == 1000  # gone before the loop has turned: hence one joined write a step
            transport.write(b"x" * 4_000_000)
            waiting = transport.get_write_buffer_size()
            assert 0 < waiting < 4_000_000
            transport.write(b"y" * 1000)
            assert transport.get_write_buffer_size() == waiting + 1000
            transport.abort()
            await protocol.lost.wait()

    run(main(), "uvloop")
