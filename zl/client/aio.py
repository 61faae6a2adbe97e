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
from typing import Self, TypeVar, Unpack

from zl.address import Target, TcpAddress, UnixAddress
from zl.client import endpoints
from zl.client.channel import ASK_TLS_S
from zl.client.errors import StreamBroken, TimedOut, TlsFailed
from zl.client.messages import Answer, Chunk, Messages, Options, Result, ServerInfo, Timeouts, join, request_fields
from zl.client.trust import Trust
from zl.client.wire import MAX_BUFFERED, Call, Wire
from zl.net.codec import Operation

_READ_BYTES = 1 << 16
_GOODBYE_S = 1.0
"""How long a closing TLS connection waits for the server's goodbye; asyncio itself would wait for half a minute."""

P = TypeVar("P", bound=asyncio.BaseProtocol)


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
    ):
        self._address = address
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

    async def connect(self) -> Self:
        """Connect and, where there is a token, say hello with it."""
        if self._task is not None:
            return self
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        transport, protocol, self._target = await open_transport(
            lambda: asyncio.StreamReaderProtocol(reader, loop=loop), self._address, self._timeouts.connect, self._trust
        )
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
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
        call = self._open(request_fields(messages, options), changed.set)
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
        call = self._open(fields, changed.set)
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

    async def close(self) -> None:
        """Close the connection; the server cancels what is still running. Closing twice is fine."""
        self._wire.lost("this client was closed")
        self._pong.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def write(self, data: bytes) -> None:
        """Send bytes; nothing happens once the connection is gone, since its calls have been told."""
        if data and self._writer is not None and not self._wire.closed:
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

    def _open(self, fields: Mapping[str, object], wake: Callable[[], None]) -> Call:
        call, frame = self._wire.open(fields, wake)
        self.write(frame)
        return call

    async def _read(self, reader: asyncio.StreamReader) -> None:
        target, alert = self._target, False
        failure: OSError | None = None
        try:
            while data := await reader.read(_READ_BYTES):
                alert = not self._wire.heard and isinstance(target, TcpAddress) and endpoints.is_tls(data)
                if alert:
                    break
                self.write(self._wire.receive(data))
                self._pong.set()
                if self._wire.closed:
                    return
        except OSError as error:
            failure = error
        if isinstance(target, TcpAddress) and not self._wire.heard:  # see Channel._look_for_tls
            found = alert or (endpoints.judged(self._n_sent) and await _speaks_tls(target))
            failure = endpoints.needs_tls(target) if found else failure
        reason = endpoints.broke(failure) if failure else endpoints.ended(target, self._wire.heard)
        self._wire.lost(reason, needs_tls=isinstance(failure, TlsFailed))
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


async def open_transport(
    factory: Callable[[], P], text: str | None, timeout: float, trust: Trust
) -> tuple[asyncio.Transport, P, Target]:
    """Connect to an address, or to the default ones for None; the one place where asyncio's clients open sockets.

    timeout  seconds for each address tried, a TLS handshake included
    Raises   ConnectionFailed, TlsFailed; ConfigError: the text is no address, or the CA file cannot be used
    """
    addresses = endpoints.candidates(text)
    loop = asyncio.get_running_loop()
    last = OSError("nothing to try")
    for address in addresses:
        try:
            async with asyncio.timeout(None if math.isinf(timeout) else timeout):
                if isinstance(address, UnixAddress):
                    return *await loop.create_unix_connection(factory, address.path), address
                if isinstance(address, TcpAddress):
                    return *await loop.create_connection(factory, address.host, address.port), address
                return *await loop.create_connection(
                    factory, address.host, address.port, ssl=trust.context(), server_hostname=address.host,
                    ssl_shutdown_timeout=_GOODBYE_S,
                ), address  # fmt: skip
        except OSError as error:  # TimeoutError is one
            last = error
    raise endpoints.failure(addresses, last, trust.ca_file) from last


async def _speaks_tls(address: TcpAddress) -> bool:
    from zl.client.tls import client_hello

    try:
        async with asyncio.timeout(ASK_TLS_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(client_hello(address.host))  # wire
                return endpoints.is_tls(await reader.read(_READ_BYTES))
            finally:
                writer.close()
    except OSError:  # TimeoutError is one
        return False
