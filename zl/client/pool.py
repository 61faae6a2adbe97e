"""A client for several servers: each request goes to the one with the fewest in flight, and to another if that fails.

State: one connection an endpoint, made when needed and again when it was lost or its server drains; one to a server
that drains stays until its answers have ended. The rules are the balancer's. Threads may share a pool. Refuses
asyncio; aio_pool.py is the same for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self, Unpack

from zl.address import Target
from zl.client.balancer import Balancer, Endpoint, Retry
from zl.client.errors import ConnectionFailed, Draining, StreamBroken, TimedOut, ZlClientError
from zl.client.messages import UNSENT, Answer, Chunk, Messages, Options, Result, Timeouts, join
from zl.client.sync import Client, Stream
from zl.client.trust import Trust

PATIENCE_S = 30.0
ATTEMPTS = 10


class Attempt(NamedTuple):
    """Where a request is: its endpoint, the connection there, the answer on it."""

    endpoint: Endpoint
    client: Client
    stream: Stream


class Pool:
    """Several servers as one.

    addresses  `tcp:HOST:PORT`, `unix:PATH` or `tls:HOST:PORT`, a list of them or a text with commas between
    timeout, auth_token, ca_file   as of `Client`
    patience   seconds that a request may wait for an endpoint and be tried again in
    attempts   how often it is tried at most
    clock, sleep   for tests; None waits as `clock` goes, and a cancel or `close` ends the wait
    Raises     ConfigError. Connections are made with the first request.
    """

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
        sleep: Callable[[float], None] | None = None,
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
        # Guards the balancer, the clients and `_closed`. Reentrant: a stream's __del__ may come while we have it.
        self._lock = threading.RLock()
        self._roused = threading.Condition(self._lock)  # some request is over, or all are
        self._known: set[Target] = set()  # addresses at which zl has answered
        self._connecting = {each: threading.Lock() for each in self._balancer.endpoints}
        self._clients: dict[Endpoint, Client] = {}
        self._leaving: list[Client] = []
        self._closed = False

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints as they stand; for looking at."""
        return tuple(self._balancer.endpoints)

    def stream(self, messages: Messages, **options: Unpack[Options]) -> PoolStream:
        """Send a request to one of the servers; see `Client.stream`. It may move until its first token has come."""
        return PoolStream(self, messages, Retry(options, self._clock(), self._patience, self._attempts))

    def ask(self, messages: Messages, **options: Unpack[Options]) -> Answer:
        """Send a request and wait for the whole answer; see `Client.ask`."""
        with self.stream(messages, **options) as stream:
            chunks = list(stream)
            assert stream.result is not None
            return join(chunks, stream.result)

    def close(self) -> None:
        """Close all connections. Closing twice is fine."""
        with self._lock:
            self._closed = True
            self._roused.notify_all()
            clients = [*self._clients.values(), *self._leaving]
            self._clients, self._leaving = {}, []
        for client in clients:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, messages: Messages, retry: Retry) -> Attempt | None:
        """Send a request to an endpoint that takes it, waiting for one if need be; None: it was stopped before."""
        while (endpoint := self._pick(retry)) is not None:
            client: Client | None = None
            try:
                options = retry.options(self._clock())
                client = self._client(endpoint)
                if retry.over:
                    self.end(endpoint)
                    break
                return Attempt(endpoint, client, client.stream(messages, **options))
            except ZlClientError as error:
                self.end(endpoint)
                if not isinstance(error, ConnectionFailed):
                    raise
                self.failed(endpoint, client, error, retry)
            except BaseException:
                self.end(endpoint)
                raise
        return None

    def stop(self, retry: Retry) -> None:
        """Try a request no more; a thread that waits for an endpoint for it wakes."""
        with self._lock:
            retry.over = True
            self._roused.notify_all()

    def failed(self, endpoint: Endpoint, client: Client | None, error: ZlClientError, retry: Retry) -> None:
        """Note a failure on a connection, or to get one; return where the request may be tried again, raise it else."""
        served = client is not None and client.served
        try:
            with self._lock:
                current = client is not None and self._clients.get(endpoint) is client
                # Those whose requests were on it hear whether TLS is spoken there, and tell.
                stale = client is not None and (not current or client.maybe_tls)
                try:
                    retry.failed(self._balancer, endpoint, error, self._clock(), served=served, stale=stale)
                finally:
                    if current and isinstance(error, ConnectionFailed | StreamBroken | Draining | TimedOut):
                        self._leaving.append(self._clients.pop(endpoint))  # others' answers on it go on
        finally:
            self._sweep()

    def end(self, endpoint: Endpoint) -> None:
        """Take the end of a request at an endpoint."""
        with self._lock:
            self._balancer.done(endpoint)
        self._sweep()

    def _sweep(self) -> None:
        """Close the connections that were given up and whose last answer has ended."""
        with self._lock:
            leaving = list(self._leaving)
        # Asked without our lock: a client has one of its own, and whoever holds that may come for ours in a __del__.
        over = [each for each in leaving if not each.in_flight]
        with self._lock:
            self._leaving = [each for each in self._leaving if each not in over]
        for each in over:
            each.close()

    def _pick(self, retry: Retry) -> Endpoint | None:
        while True:
            with self._lock:
                if retry.over:
                    return None
                if self._closed:
                    raise ConnectionFailed("this pool was closed")
                now = self._clock()
                due = self._balancer.due(now)
                endpoint = self._balancer.pick(now)
                seconds = 0.0
                if endpoint is None:
                    seconds = retry.pause(self._balancer, now) if not due else 0.001
            for each in due:
                threading.Thread(target=self._probe, args=(each,), name="zl client probe", daemon=True).start()
            if endpoint is not None:
                return endpoint
            if self._sleep is not None:
                self._sleep(seconds)
                continue
            with self._lock:
                self._roused.wait_for(lambda: retry.over or self._closed, min(seconds, threading.TIMEOUT_MAX))

    def _client(self, endpoint: Endpoint) -> Client:
        with self._connecting[endpoint]:
            with self._lock:
                client = self._clients.get(endpoint)
                if client is not None and client.closed:
                    # Found out while nothing was being answered on it, or what is may still hear why it ended.
                    self._leaving.append(self._clients.pop(endpoint))
                    client = None
            if client is None:
                client = self._connection(endpoint)
                self._keep(endpoint, client)
            return client

    def _connection(self, endpoint: Endpoint) -> Client:
        return Client(endpoint.address, timeout=self._timeout, auth_token=self._token, ca_file=self._trust,
                      known=self._known)  # fmt: skip

    def _probe(self, endpoint: Endpoint) -> None:
        client: Client | None = None
        try:
            client = self._connection(endpoint)
            client.ping()
        except ZlClientError as error:
            if client is not None:
                client.close()
            with self._lock:
                self._balancer.dead(endpoint, self._clock(), error)
            return
        self._keep(endpoint, client)
        with self._lock:
            self._balancer.alive(endpoint)

    def _keep(self, endpoint: Endpoint, client: Client) -> None:
        with self._lock:
            closed = self._closed
            old = None if closed else self._clients.get(endpoint)
            if old is not None:
                self._leaving.append(old)
            if not closed:
                self._clients[endpoint] = client
        if closed:
            client.close()
        self._sweep()


class PoolStream:
    """An answer on its way from one of the servers; used like `Stream`. It moves to another until a token has come."""

    def __init__(self, pool: Pool, messages: Messages, retry: Retry):
        self._pool = pool
        self._messages = messages
        self._retry = retry
        # One thread iterates, any may cancel or close. Reentrant: a __del__ may come while we have it.
        self._lock = threading.RLock()  # guards what follows
        self._open = False  # `_at` counts as in flight
        self._cancelled = self._closed = False
        self._cut: Result | None = None  # the result where a cancel found the request between two servers
        at = pool.begin(messages, retry)
        assert at is not None  # nobody else has this request yet
        self._at = at
        self._open = True

    @property
    def result(self) -> Result | None:
        """How the answer ended; None before its end."""
        return self._cut or self._at.stream.result

    @property
    def address(self) -> str:
        """Who answers."""
        return self._at.endpoint.address

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while not (self._closed or self._cut):
            try:
                return next(self._at.stream)
            except StopIteration:
                self._end()
                raise
            except ZlClientError as error:
                if not self._end():
                    if self._closed:
                        break
                    raise
                self._pool.failed(self._at.endpoint, self._at.client, error, self._retry)
            self._move()
        raise StopIteration

    def cancel(self) -> None:
        """Ask the server to stop; the iterator ends with what had been generated, and `result` says CANCELLED."""
        with self._lock:
            self._cancelled = True
            at = self._at if self._open else None
        self._pool.stop(self._retry)
        if at is not None:
            at.stream.cancel()

    def close(self) -> None:
        """Stop reading; a request that still runs is cancelled. Closing twice is fine."""
        with self._lock:
            self._closed = True
        self._pool.stop(self._retry)
        self._drop()

    def _move(self) -> None:
        """Go to another server, unless the answer was cancelled or closed meanwhile."""
        at = self._pool.begin(self._messages, self._retry)
        with self._lock:
            if at is not None:
                self._at, self._open = at, True
            elif not self._closed:
                self._cut = UNSENT
            closed, cancelled = self._closed, self._cancelled
        # What came while the request was being sent did not find it there.
        if closed:
            self._drop()
        elif cancelled and at is not None:
            at.stream.cancel()

    def _drop(self) -> None:
        with self._lock:
            at = self._at if self._open else None
        if at is not None:
            at.stream.close()
            self._end()

    def _end(self) -> bool:
        """Take the end of the request where it is; False: that was done."""
        with self._lock:
            at = self._at if self._open else None
            self._open = False
        if at is not None:
            self._pool.end(at.endpoint)
        return at is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._drop()
