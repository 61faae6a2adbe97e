"""The client for asyncio: the same calls as `Client`, awaited, on one connection of the running loop.

State: the connection's streams, one reading task, the wire's books. Not for use from other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Self, Unpack

from zl.address import Target, TcpAddress
from zl.client import endpoints
from zl.client.aio_channel import end_transport, open_transport, speaks_tls
from zl.client.errors import ConnectionFailed, StreamBroken, TimedOut, TlsFailed
from zl.client.messages import Answer, Chunk, Messages, Options, Result, ServerInfo, Timeouts, join, request_fields
from zl.client.trust import Trust
from zl.client.wire import MAX_BUFFERED, Call, Wire
from zl.net.codec import Operation

_READ_BYTES = 1 << 16


class AsyncClient:
    """A connection to a server: `async with AsyncClient(address) as client`, or `client = await AsyncClient(address)`.

    Arguments and errors are those of `Client`; connecting happens in the `async with` or `await`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float | Timeouts | None = None,
        auth_token: str | None = None,
        ca_file: str | os.PathLike[str] | Trust | None = None,
        max_buffered: int = MAX_BUFFERED,
        known: set[Target] | None = None,
    ):
        self._address = address
        self._known = set() if known is None else known
        self._trust = Trust.of(ca_file)
        self._target: Target | None = None
        self._timeouts = Timeouts.of(timeout)
        self._token = endpoints.token_of(auth_token)
        self._wire = Wire(max_buffered)
        self._wire.closed = "this client is not connected yet"
        self._pong = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._n_sent = 0
        self._task: asyncio.Task[None] | None = None
        self._left = False

    async def connect(self) -> Self:
        """Connect and, where there is a token, say hello with it."""
        if self._left:
            raise ConnectionFailed("this client was closed")
        if self._task is not None:
            return self
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        transport, protocol, self._target = await open_transport(
            lambda: asyncio.StreamReaderProtocol(reader, loop=loop), self._address, self._timeouts.connect, self._trust
        )
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        if self._left:  # closed by another task meanwhile
            end_transport(transport)
            raise ConnectionFailed("this client was closed")
        self._wire.closed = ""
        self._task = asyncio.create_task(self._read(reader), name="zl client reader")
        if self._token:
            try:
                await self.hello(self._token)
            except BaseException:
                await self.close()
                raise
        return self

    def __await__(self) -> Generator[object, None, Self]:
        return self.connect().__await__()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def stream(self, messages: Messages, **options: Unpack[Options]) -> AsyncStream:
        """Send a request and return its answer as an asynchronous iterator of chunks; see `Client.stream`."""
        changed = asyncio.Event()
        call = self._open(request_fields(messages, options), changed.set, self._timeouts.first_token)
        return AsyncStream(self, call, changed, self._timeouts)

    async def ask(self, messages: Messages, **options: Unpack[Options]) -> Answer:
        """Send a request and wait for the whole answer; see `Client.ask`."""
        async with self.stream(messages, **options) as stream:
            chunks = [chunk async for chunk in stream]
            assert stream.result is not None
            return join(chunks, stream.result)

    async def hello(self, auth_token: str = "") -> ServerInfo:
        """Ask the server what it is, and show it the token if there is one."""
        changed = asyncio.Event()
        fields = {"operation": Operation.HELLO, "auth_token": auth_token}
        call = self._open(fields, changed.set, self._timeouts.connect)
        if not await wait_for(call.readable, changed, self._timeouts.connect):
            self.abandon(call)
            raise TimedOut(f"no answer to hello within {self._timeouts.connect:g} s", phase="hello")
        call.take()
        if call.server is None:
            raise StreamBroken("the server answered hello without saying what it is")
        return call.server

    async def ping(self) -> float:
        """Send a ping and return the seconds until its answer; see `Client.ping`."""
        start = time.monotonic()
        number, frame = self._wire.ping()
        self.write(frame)
        if not await wait_for(lambda: self._wire.ponged(number) or bool(self._wire.closed), self._pong,
                              self._timeouts.connect):  # fmt: skip
            more = endpoints.silent(self._target, self._wire.heard)
            raise TimedOut(f"no answer to a ping within {self._timeouts.connect:g} s{more}", phase="ping")
        if not self._wire.ponged(number):
            raise self._wire.failure()
        return time.monotonic() - start

    @property
    def in_flight(self) -> int:
        """Count the requests whose last frame has not come."""
        return self._wire.in_flight

    @property
    def served(self) -> bool:
        """Say whether any answer has begun on this connection."""
        return self._wire.served

    @property
    def closed(self) -> str:
        """Why the connection is known to be gone; empty while it is not."""
        return self._wire.closed

    @property
    def maybe_tls(self) -> bool:
        """Say whether the connection is gone because the server speaks TLS, or that is being found out."""
        return self._wire.maybe_tls

    async def close(self) -> None:
        """Close the connection; the server cancels what is still running. Closing twice is fine."""
        self.hang_up()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def hang_up(self) -> None:
        """Do all of `close` that needs no waiting; what awaits `close` may be cancelled, this is done by then."""
        self._left = True
        self._wire.lost("this client was closed")
        self._pong.set()
        if self._task is not None:
            self._task.cancel()
        if self._writer is not None:
            end_transport(self._writer.transport)

    def write(self, data: bytes) -> None:
        """Send bytes; nothing happens once the connection is gone, since its calls are told by the reading task."""
        if data and self._writer is not None and not self._wire.closed and not self._writer.is_closing():
            self._n_sent += len(data)
            self._writer.write(data)  # wire

    async def drain(self) -> None:
        """Wait while more is unsent than the transport likes to hold."""
        if self._writer is not None and not self._wire.closed:
            # A connection that broke is told to each call by the reading task, with the reason.
            with contextlib.suppress(OSError):
                await self._writer.drain()

    def abandon(self, call: Call) -> None:
        """Cancel a call whose answer nobody will read."""
        self.write(self._wire.abandon(call))

    def cancel(self, call: Call) -> None:
        """Ask the server to end a call early; its last frame still comes."""
        self.write(self._wire.cancel(call))

    def _open(self, fields: Mapping[str, Any], wake: Callable[[], None], timeout: float) -> Call:
        patience = min(timeout, (fields.get("deadline_ms") or math.inf) / 1000)
        call, frame = self._wire.open(fields, wake, time.monotonic() + patience)
        self.write(frame)
        return call

    async def _read(self, reader: asyncio.StreamReader) -> None:
        wire, target, failure = self._wire, self._target, None
        assert self._writer is not None
        assert target is not None
        try:
            while data := await reader.read(_READ_BYTES):
                if not wire.heard:
                    if isinstance(target, TcpAddress) and endpoints.is_tls(data):
                        raise endpoints.needs_tls(target)
                    self._known.add(target)
                self.write(wire.receive(data))
                self._pong.set()
                if wire.closed:
                    break
        except OSError as error:
            failure = error
        end_transport(self._writer.transport)  # a server that stops waits for our end
        if not wire.closed:
            await self._end(target, failure)

    async def _end(self, target: Target, failure: OSError | None) -> None:
        """Note that the server ended the connection, and why."""
        wire = self._wire
        reason = endpoints.broke(failure) if failure else endpoints.ended(target, wire.heard)
        needs_tls = isinstance(failure, TlsFailed)
        if isinstance(target, TcpAddress) and not (needs_tls or wire.heard or target in self._known):
            seconds = min(wire.ending(reason, time.monotonic()), self._timeouts.connect)
            self._pong.set()  # as in Client: what is new goes elsewhere from here on
            if endpoints.judged(self._n_sent) and await speaks_tls(target, seconds):
                reason, needs_tls = str(endpoints.needs_tls(target)), True
        wire.lost(reason, needs_tls=needs_tls)
        self._pong.set()


class AsyncStream:
    """An answer on its way: iterate over its chunks, then look at `result`. Closing it early cancels the request."""

    def __init__(self, client: AsyncClient, call: Call, changed: asyncio.Event, timeouts: Timeouts):
        self._client = client
        self._call = call
        self._changed = changed
        self._timeouts = timeouts

    @property
    def result(self) -> Result | None:
        """How the answer ended; None before its end."""
        return self._call.result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        call = self._call
        if call.abandoned and call.error is None:
            raise StopAsyncIteration
        first = not call.n_tokens
        timeout = self._timeouts.first_token if first else self._timeouts.between_tokens
        try:
            if first:
                await self._client.drain()
            ready = await wait_for(call.readable, self._changed, timeout)
        except asyncio.CancelledError:
            await self.close()
            raise
        if not ready:
            await self.close()
            phase = "first token" if first else "next token"
            raise TimedOut(f"no {phase} within {timeout:g} s", phase=phase, tokens_received=call.n_tokens)
        chunk = call.take()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def cancel(self) -> None:
        """Ask the server to stop; the iterator ends with what had been generated, and `result` says CANCELLED."""
        self._client.cancel(self._call)

    async def close(self) -> None:
        """Stop reading; a request that still runs is cancelled. Closing twice is fine."""
        self._close()

    aclose = close

    def _close(self) -> None:
        if not self._call.ended and not self._call.abandoned:
            self._client.abandon(self._call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def __del__(self) -> None:
        # As in Stream; the loop may be closed by now, and then the connection is too.
        with contextlib.suppress(RuntimeError):
            self._close()


async def wait_for(ready: Callable[[], bool], changed: asyncio.Event, timeout: float) -> bool:
    """Wait until `ready()`, asked again whenever `changed` is set; False where `timeout` seconds pass first."""
    try:
        async with asyncio.timeout(None if math.isinf(timeout) else timeout):
            while not ready():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        return ready()
    return True
