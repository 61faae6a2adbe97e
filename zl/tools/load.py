"""Drive a server with many streams: connections that cost little, and the ways in which requests come.

A driver gives each stream's request to a connection and follows its answer; `Streams` speaks the frames itself, so that
the generator is not the bottleneck, `ClientStreams` goes through `zl.client`, to measure that.
State: a driver's open connections, and the counts that a progress line shows. Refuses torch and numpy.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from zl.address import Target
from zl.client import endpoints
from zl.client.aio import AsyncClient
from zl.client.aio_channel import open_transport
from zl.client.errors import ZlClientError
from zl.client.trust import Trust
from zl.errors import Code
from zl.net import schema_pb2
from zl.net.codec import encode_request
from zl.net.messages import Operation, RequestType
from zl.shapes import HEADER_BYTES
from zl.tools.prompts import Prompt
from zl.tools.traces import Trace

clock = time.perf_counter

_CONNECT_AT_ONCE = 100  # below the usual listen backlog
_HELLO_ID = 2**63  # streams have small ones
_USAGE = ("constant_tokens", "queue_us", "prefill_us", "decode_us", "glue_us")


class Driver(Protocol):
    """Streams to one server. `tokens` and `frames` count what has come since the driver was made."""

    tokens: int
    frames: int

    async def connect(self, n: int) -> None:
        """Have connections for at least n streams."""

    async def ask(self, prompt: Prompt, stream: int) -> Trace:
        """Send one request and follow its answer to the end; one at a time on a stream."""

    def progress(self, stream: int) -> int:
        """Count the token frames that the stream's running answer has had."""

    async def close(self) -> None:
        """Close all connections."""


def encode(prompt: Prompt, request_id: int) -> bytes:
    """Make a prompt's frame; the answer runs to its full length."""
    return encode_request(
        request_id=request_id,
        system=prompt.system,
        messages=prompt.messages,
        max_tokens=prompt.max_tokens,
        type=RequestType[prompt.type],
        ignore_eos=True,
    )


def _said(error: Any) -> str:
    name = Code(error.code).name if error.code in Code.__members__.values() else f"code {error.code}"
    return f"{name}: {error.message}"


class _Connection(asyncio.Protocol):
    """Frames of any number of streams, each read of the socket stamped once."""

    def __init__(self, owner: Streams):
        self._owner = owner
        self._parse = schema_pb2.Response.FromString
        self._held = bytearray()
        self.running: dict[int, tuple[Trace, asyncio.Future[None]]] = {}
        self.transport: Any = None
        self.address: Target | None = None
        self.last_words = ""  # why the server ends it, where it said so

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        heard = self._owner.frames > 0
        why = endpoints.broke(exc) if isinstance(exc, OSError) else endpoints.ended(self.address, heard)
        why = self.last_words or why
        for trace, ended in self.running.values():
            trace.error = trace.error or why
            if not ended.done():
                ended.set_result(None)
        self.running.clear()

    def data_received(self, data: bytes) -> None:
        now = clock()
        held = self._held
        held += data
        at, have = 0, len(held)
        while have - at >= HEADER_BYTES:
            stop = at + HEADER_BYTES + int.from_bytes(held[at : at + HEADER_BYTES], "big")
            if have < stop:
                break
            if stop - at > HEADER_BYTES:
                self._take(self._parse(bytes(held[at + HEADER_BYTES : stop])), now)
            at = stop
        del held[:at]

    def _take(self, response: Any, now: float) -> None:
        found = self.running.get(response.request_id)
        if found is None:
            if response.is_finished and response.HasField("error"):  # of the connection, or of its HELLO
                self.last_words = _said(response.error)
            return
        trace, ended = found
        n = len(response.token_ids)
        if n:
            trace.arrivals.append(now)
            trace.n_tokens += n
            self._owner.tokens += n
            self._owner.frames += 1
        if response.is_finished:
            if response.HasField("error"):
                trace.error = _said(response.error)
            trace.prompt_tokens = response.usage.prompt_tokens
            trace.usage = {name: getattr(response.usage, name) for name in _USAGE}
            del self.running[response.request_id]
            if not ended.done():
                ended.set_result(None)

    async def ask(self, prompt: Prompt, request_id: int) -> Trace:
        if self.transport.is_closing():
            return Trace(error=self.last_words or "the server has closed the connection")
        ended = asyncio.get_running_loop().create_future()
        data = encode(prompt, request_id)
        trace = Trace(sent=clock())
        self.running[request_id] = (trace, ended)
        self.transport.write(data)  # wire
        await ended
        return trace


class Streams:
    """The frames spoken directly. Stream i is on connection i modulo their number.

    connections   0: one a stream
    ca_file       for tls: as of `zl.client.Client`; so is auth_token
    """

    def __init__(
        self, address: str, connections: int = 0, ca_file: str | None = None, auth_token: str | None = None
    ):
        self._address = address
        token = endpoints.token_of(auth_token)
        hello = encode_request(request_id=_HELLO_ID, operation=Operation.HELLO, auth_token=token)
        self._hello = hello if token else b""
        self._trust = Trust(ca_file)
        self._connections = connections
        self._open: list[_Connection] = []
        self.tokens = 0
        self.frames = 0

    async def connect(self, n: int) -> None:
        """Have connections for at least n streams.

        Raises  ConnectionFailed
        """
        wanted = min(n, self._connections) if self._connections else n
        self._open = [each for each in self._open if not each.transport.is_closing()]
        while len(self._open) < wanted:
            batch = min(_CONNECT_AT_ONCE, wanted - len(self._open))
            self._open += await asyncio.gather(*(self.extra() for _ in range(batch)))

    async def extra(self) -> _Connection:
        """Open one more connection, which no stream uses."""
        _, connection, address = await open_transport(
            lambda: _Connection(self), self._address, math.inf, self._trust
        )
        connection.address = address
        if self._hello:
            connection.transport.write(self._hello)
        return connection

    async def ask(self, prompt: Prompt, stream: int) -> Trace:
        """Send one request and follow its answer to the end; one at a time on a stream."""
        return await self._open[stream % len(self._open)].ask(prompt, stream + 1)

    def progress(self, stream: int) -> int:
        """Count the token frames that the stream's running answer has had."""
        found = self._open[stream % len(self._open)].running.get(stream + 1)
        return len(found[0].arrivals) if found else 0

    def server_pid(self) -> int:
        """Name the process at the other end of a Unix socket; 0 where that cannot be known."""
        sock = self._open[0].transport.get_extra_info("socket") if self._open else None
        if sock is None or sock.family != socket.AF_UNIX:
            return 0
        return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]

    async def close(self) -> None:
        """Close all connections."""
        for each in self._open:
            each.transport.close()
        self._open = []
        await asyncio.sleep(0)


class ClientStreams:
    """The same through `zl.client.AsyncClient`, all streams on `connections` clients (at least one)."""

    def __init__(
        self, address: str, connections: int = 1, ca_file: str | None = None, auth_token: str | None = None
    ):
        self._address = address
        self._token = auth_token
        self._trust = Trust(ca_file)
        self._connections = max(1, connections)
        self._clients: list[AsyncClient] = []
        self._running: dict[int, Trace] = {}
        self.tokens = 0
        self.frames = 0

    async def connect(self, n: int) -> None:  # noqa: ARG002 (streams share the clients)
        """Have the clients connected."""
        while len(self._clients) < self._connections:
            self._clients.append(await AsyncClient(self._address, auth_token=self._token, ca_file=self._trust))

    async def ask(self, prompt: Prompt, stream: int) -> Trace:
        """Send one request and follow its answer to the end; one at a time on a stream."""
        client = self._clients[stream % len(self._clients)]
        trace = self._running[stream] = Trace(sent=clock())
        try:
            answer = client.stream(prompt.messages, system=prompt.system, max_tokens=prompt.max_tokens,
                                   type=prompt.type, ignore_eos=True)  # fmt: skip
            async for chunk in answer:
                if chunk.token_ids:
                    trace.arrivals.append(clock())
                    trace.n_tokens += len(chunk.token_ids)
                    self.tokens += len(chunk.token_ids)
                    self.frames += 1
            usage = answer.result.usage if answer.result else None
            if usage is not None:
                trace.prompt_tokens = usage.prompt_tokens
                trace.usage = {name: getattr(usage, name) for name in _USAGE}
        except ZlClientError as error:
            trace.error = str(error)
        return trace

    def progress(self, stream: int) -> int:
        """Count the token frames that the stream's running answer has had."""
        return len(self._running[stream].arrivals) if stream in self._running else 0

    async def close(self) -> None:
        """Close the clients."""
        for client in self._clients:
            await client.close()
        self._clients = []


async def burst(driver: Driver, asked: Sequence[Prompt], streams: int) -> list[Trace]:
    """Send one request on each stream at once, and the next on a stream when its answer has ended."""
    traces: list[Trace] = []

    async def follow(stream: int) -> None:
        for prompt in asked[stream::streams]:
            traces.append(await driver.ask(prompt, stream))

    await driver.connect(streams)
    with no_collector():
        await asyncio.gather(*(follow(i) for i in range(streams)))
    return traces


async def arrivals(driver: Driver, asked: Sequence[Prompt], times: Sequence[float]) -> list[Trace]:
    """Send request i at times[i] seconds from now, whatever has become of the others; each is a stream of its own."""
    await driver.connect(len(asked))
    begun = clock()

    async def follow(i: int) -> Trace:
        await asyncio.sleep(max(0.0, begun + times[i] - clock()))
        return await driver.ask(asked[i], i)

    with no_collector():
        return list(await asyncio.gather(*(follow(i) for i in range(len(asked)))))


async def long_into(
    driver: Driver, asked: Sequence[Prompt], long: Prompt, settled: int = 16
) -> tuple[list[Trace], Trace]:
    """Run the streams, send the long prompt when each has had `settled` token frames, follow all to their end."""
    n = len(asked)
    await driver.connect(n + 1)
    with no_collector():
        running = [asyncio.ensure_future(driver.ask(prompt, i)) for i, prompt in enumerate(asked)]
        while any(driver.progress(i) < settled and not running[i].done() for i in range(n)):
            await asyncio.sleep(0.005)
        trace = await driver.ask(long, n)
        return list(await asyncio.gather(*running)), trace


@contextmanager
def no_collector() -> Iterator[None]:
    """Keep Python's cycle collector from stretching gaps that are then laid at the server's door."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cpu_seconds(pid: int) -> float | None:
    """Read how long a process has computed, user and system; None where it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
