"""The pool for asyncio: the same calls as `Pool`, awaited. The rules are the balancer's.

State: one connection an endpoint, those to servers that drain until their answers have ended, and the probes under
way. For one loop; not for use from other threads.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, Self, Unpack

from zl.address import Target
from zl.client.aio import AsyncClient, AsyncStream
from zl.client.balancer import Balancer, Endpoint, Retry
from zl.client.errors import ConnectionFailed, Draining, StreamBroken, TimedOut, ZlClientError
from zl.client.messages import UNSENT, Answer, Chunk, Messages, Options, Result, Timeouts, join
from zl.client.pool import ATTEMPTS, PATIENCE_S
from zl.client.trust import Trust


class AsyncAttempt(NamedTuple):
    """Where a request is: its endpoint, the connection there, the answer on it."""

    endpoint: Endpoint
    client: AsyncClient
    stream: AsyncStream


class AsyncPool:
    """Several servers as one; arguments and errors are those of `Pool`. Use it with `async with`, or close it."""

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        timeout: float | Timeouts | None = None,
        auth_token: str | None = None,
        ca_file: str | os.PathLike[str] | Trust | None = None,
        patience: float = PATIENCE_S,
        attempts: int = ATTEMPTS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._balancer = Balancer(addresses)
        self._timeout = timeout
        self._token = auth_token
        self._trust = Trust.of(ca_file)
        self._trust.check(each.address for each in self._balancer.endpoints)
        self._patience = patience
        self._attempts = attempts
        self._clock = clock
        self._sleep = sleep
        self._known: set[Target] = set()  # addresses at which zl has answered
        self._connecting = {each: asyncio.Lock() for each in self._balancer.endpoints}
        self._clients: dict[Endpoint, AsyncClient] = {}
        self._leaving: list[AsyncClient] = []
        self._probes: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints as they stand; for looking at."""
        return tuple(self._balancer.endpoints)

    def stream(self, messages: Messages, **options: Unpack[Options]) -> AsyncPoolStream:
        """Send a request to one of the servers; see `Client.stream`. It may move until its first token has come."""
        return AsyncPoolStream(self, messages, Retry(options, self._clock(), self._patience, self._attempts))

    async def ask(self, messages: Messages, **options: Unpack[Options]) -> Answer:
        """Send a request and wait for the whole answer; see `Client.ask`."""
        async with self.stream(messages, **options) as stream:
            chunks = [chunk async for chunk in stream]
            assert stream.result is not None
            return join(chunks, stream.result)

    async def close(self) -> None:
        """Close all connections. Closing twice is fine."""
        self._closed = True
        for probe in self._probes:
            probe.cancel()
        clients = [*self._clients.values(), *self._leaving]
        self._clients, self._leaving = {}, []
        for client in clients:
            client.hang_up()  # all of them before anything is awaited, where we may be cancelled
        closing = [client.close() for client in clients]
        await asyncio.gather(*self._probes, *self._closing, *closing, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def begin(self, messages: Messages, retry: Retry) -> AsyncAttempt:
        """Send a request to an endpoint that takes it, waiting for one if need be."""
        while True:
            self._sweep()
            endpoint = await self._pick(retry)
            client: AsyncClient | None = None
            try:
                client = await self._client(endpoint)
                return AsyncAttempt(endpoint, client, client.stream(messages, **retry.options(self._clock())))
            except ZlClientError as error:
                self.end(endpoint)
                if not isinstance(error, ConnectionFailed):
                    raise
                await self.failed(endpoint, client, error, retry)
            except BaseException:
                self.end(endpoint)
                raise

    async def failed(
        self, endpoint: Endpoint, client: AsyncClient | None, error: ZlClientError, retry: Retry
    ) -> None:
        """Note a failure on a connection, or to get one; return where the request may be tried again, raise it else."""
        current = client is not None and self._clients.get(endpoint) is client
        # Those whose requests were on it hear whether TLS is spoken there, and tell.
        stale = client is not None and (not current or client.maybe_tls)
        served = client is not None and client.served
        try:
            retry.failed(self._balancer, endpoint, error, self._clock(), served=served, stale=stale)
        finally:
            if current and isinstance(error, ConnectionFailed | StreamBroken | Draining | TimedOut):
                self._leaving.append(self._clients.pop(endpoint))  # others' answers on it go on
            self._sweep()

    def end(self, endpoint: Endpoint) -> None:
        """Take the end of a request at an endpoint."""
        self._balancer.done(endpoint)

    def _sweep(self) -> None:
        """Close the connections that were given up and whose last answer has ended."""
        for client in [each for each in self._leaving if not each.in_flight]:
            self._leaving.remove(client)
            client.hang_up()  # a task that is cancelled before its first step would never
            _keep(self._closing, asyncio.create_task(client.close(), name="zl client close"))

    async def _pick(self, retry: Retry) -> Endpoint:
        while True:
            if self._closed:
                raise ConnectionFailed("this pool was closed")
            now = self._clock()
            for each in self._balancer.due(now):
                _keep(self._probes, asyncio.create_task(self._probe(each), name="zl client probe"))
            endpoint = self._balancer.pick(now)
            if endpoint is not None:
                return endpoint
            await self._sleep(retry.pause(self._balancer, now))

    async def _client(self, endpoint: Endpoint) -> AsyncClient:
        async with self._connecting[endpoint]:
            client = self._clients.get(endpoint)
            if client is not None and client.closed:
                # Found out while nothing was being answered on it, or what is may still hear why it ended.
                self._leaving.append(self._clients.pop(endpoint))
                client = None
            if client is None:
                client = await self._connection(endpoint)
                await self._adopt(endpoint, client)
            return client

    def _connection(self, endpoint: Endpoint) -> AsyncClient:
        return AsyncClient(endpoint.address, timeout=self._timeout, auth_token=self._token, ca_file=self._trust,
                           known=self._known)  # fmt: skip

    async def _adopt(self, endpoint: Endpoint, client: AsyncClient) -> None:
        """Use a new connection from now on; one that was made meanwhile goes once its answers have ended."""
        if self._closed:
            await client.close()
            return
        if endpoint in self._clients:
            self._leaving.append(self._clients[endpoint])
        self._clients[endpoint] = client

    async def _probe(self, endpoint: Endpoint) -> None:
        client = self._connection(endpoint)
        try:
            await client.connect()
            await client.ping()
        except ZlClientError as error:
            await client.close()
            self._balancer.dead(endpoint, self._clock(), error)
            return
        except BaseException:
            await client.close()
            raise
        await self._adopt(endpoint, client)
        self._balancer.alive(endpoint)
        self._sweep()


class AsyncPoolStream:
    """An answer on its way from one of the servers; used like `AsyncStream`. It moves until a token has come."""

    def __init__(self, pool: AsyncPool, messages: Messages, retry: Retry):
        self._pool = pool
        self._messages = messages
        self._retry = retry
        self._at: AsyncAttempt | None = None  # where the request is; counts as in flight there
        self._last: AsyncStream | None = None
        self._ended = self._cancelled = False
        self._cut: Result | None = None  # the result where a cancel found the request between two servers
        self._starting: asyncio.Task[None] | None = self._start()

    @property
    def result(self) -> Result | None:
        """How the answer ended; None before its end."""
        return self._cut or (self._last.result if self._last is not None else None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ended:
            try:
                if (starting := self._starting) is not None:
                    await asyncio.wait([starting])  # itself, it would cancel us where `cancel` or `close` cancels it
                    if self._ended:
                        break
                    self._starting = None
                    starting.result()
                if self._at is None:
                    break
                return await anext(self._at.stream)
            except ZlClientError as error:
                if self._at is None:
                    self._ended = True
                    raise
                at = self._at
                self._leave()
                try:
                    await self._pool.failed(at.endpoint, at.client, error, self._retry)
                except BaseException:
                    self._ended = True
                    raise
                if self._cancelled:
                    self._stop()
                elif not self._ended:  # else it was closed meanwhile
                    self._starting = self._start()
            except BaseException:  # the end of the answer, and cancelling too
                await self.close()
                raise
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Ask the server to stop; the iterator ends with what had been generated, and `result` says CANCELLED."""
        self._cancelled = True
        if self._at is not None:
            self._at.stream.cancel()
        else:
            self._stop()

    def _stop(self) -> None:
        """End a cancelled request that no server has, unless it has ended."""
        if not self._ended:
            self._ended, self._cut = True, UNSENT
            if self._starting is not None:
                self._starting.cancel()

    async def close(self) -> None:
        """Stop reading; a request that still runs is cancelled. Closing twice is fine."""
        self._ended = True
        if self._at is not None:
            await self._at.stream.close()
            self._leave()
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    aclose = close

    def _start(self) -> asyncio.Task[None]:
        async def begin() -> None:
            self._at = await self._pool.begin(self._messages, self._retry)
            self._last = self._at.stream

        task = asyncio.get_running_loop().create_task(begin(), name="zl client request")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever never iterates never asks
        return task

    def _leave(self) -> None:
        if self._at is not None:
            self._pool.end(self._at.endpoint)
            self._at = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        self._leave()  # the stream inside cancels its request in its own __del__


def _keep(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    """Hold a task until it is done: the loop itself holds it only weakly."""
    tasks.add(task)
    task.add_done_callback(tasks.discard)
