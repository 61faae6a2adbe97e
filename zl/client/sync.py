"""The client for ordinary code and threads: blocking calls over one connection.

State: the channel and the wire's books. Any number of threads may use one client: whoever waits for something first
reads for all, the others sleep until their frames have come. Refuses asyncio.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, Unpack

from zl.address import Target
from zl.client import endpoints
from zl.client.channel import open_channel
from zl.client.errors import ConnectionFailed, StreamBroken, TimedOut, TlsFailed
from zl.client.messages import Answer, Chunk, Messages, Options, Result, ServerInfo, Timeouts, join, request_fields
from zl.client.trust import Trust
from zl.client.wire import MAX_BUFFERED, Call, Wire
from zl.net.codec import Operation

_LAST_WORDS_S = 1.0


class Client:
    """A connection to a server.

    address     `tcp:HOST:PORT`, `unix:PATH`, or `tls:HOST:PORT` where the server has a certificate, which must be for
                HOST; None: `ZL_CONNECT`, the default Unix socket, or port 7433 here
    timeout     seconds for each wait, or Timeouts; None: the defaults of Timeouts
    auth_token  said first where the server asks for one; None: `ZL_AUTH_TOKEN`, if that is set
    ca_file     for tls: PEM file with the authorities to believe, or a Trust to share; None: `ZL_CA`, else the system's
    known       for pools, whose clients share it: addresses at which zl has answered, and nobody is asked for TLS
    Raises      ConnectionFailed, TlsFailed, Unauthenticated; ConfigError: no such kind of address
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
        self._timeouts = Timeouts.of(timeout)
        self._known = set() if known is None else known
        self._wire = Wire(max_buffered)
        self._changed = threading.Condition()  # guards the wire's books and `_reading`
        self._reading = False
        self._channel = open_channel(address, self._timeouts.connect, Trust.of(ca_file))
        if token := endpoints.token_of(auth_token):
            try:
                self.hello(token)
            except BaseException:
                self.close()
                raise

    def stream(self, messages: Messages, **options: Unpack[Options]) -> Stream:
        """Send a request and return its answer as an iterator of chunks; several may run at the same time.

        messages  a text, or user, assistant, user… in turn
        options   see Options
        Raises    here: BadRequest, ConnectionFailed; while iterating: any ZlClientError
        """
        call = self._open(request_fields(messages, options), self._timeouts.first_token)
        return Stream(self, call, self._timeouts)

    def ask(self, messages: Messages, **options: Unpack[Options]) -> Answer:
        """Send a request and wait for the whole answer. Arguments and errors are those of `stream`."""
        with self.stream(messages, **options) as stream:
            chunks = list(stream)
            assert stream.result is not None
            return join(chunks, stream.result)

    def hello(self, auth_token: str = "") -> ServerInfo:
        """Ask the server what it is, and show it the token if there is one."""
        fields = {"operation": Operation.HELLO, "auth_token": auth_token}
        call = self._open(fields, self._timeouts.connect)
        if not self.pump(call.readable, self._timeouts.connect):
            self.abandon(call)
            raise TimedOut(f"no answer to hello within {self._timeouts.connect:g} s", phase="hello")
        call.take()
        if call.server is None:
            raise StreamBroken("the server answered hello without saying what it is")
        return call.server

    def ping(self) -> float:
        """Send a ping and return the seconds until its answer.

        Raises  ConnectionFailed: the connection is gone; TimedOut
        """
        start = time.monotonic()
        with self._changed:
            number, frame = self._wire.ping()
        self._send(frame)
        if not self.pump(lambda: self._wire.ponged(number) or bool(self._wire.closed), self._timeouts.connect):
            more = endpoints.silent(self._channel.address, self._wire.heard)
            raise TimedOut(f"no answer to a ping within {self._timeouts.connect:g} s{more}", phase="ping")
        if not self._wire.ponged(number):
            raise self._wire.failure()
        return time.monotonic() - start

    @property
    def in_flight(self) -> int:
        """Count the requests whose last frame has not come."""
        with self._changed:
            return self._wire.in_flight

    @property
    def served(self) -> bool:
        """Say whether any answer has begun on this connection."""
        with self._changed:
            return self._wire.served

    @property
    def closed(self) -> str:
        """Why the connection is known to be gone; empty while it is not."""
        return self._wire.closed

    @property
    def maybe_tls(self) -> bool:
        """Say whether the connection is gone because the server speaks TLS, or that is being found out."""
        return self._wire.maybe_tls

    def close(self) -> None:
        """Close the connection; the server cancels what is still running. Closing twice is fine."""
        with self._changed:
            self._wire.lost("this client was closed")
            self._changed.notify_all()
        self._channel.shut()  # wakes a thread that is reading
        with self._changed:
            while self._reading:
                self._changed.wait(0.1)
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pump(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Read until `ready()`, which is asked under the lock; False where `timeout` seconds pass first."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self._reading or self._wire.closed:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                self._read_once(left)
            return True

    def abandon(self, call: Call) -> None:
        """Cancel a call whose answer nobody will read."""
        with self._changed:
            frame = self._wire.abandon(call)
            self._changed.notify_all()  # another thread may be waiting for it
        with contextlib.suppress(ConnectionFailed):
            self._send(frame, wait=False)  # it may be a __del__'s

    def cancel(self, call: Call) -> None:
        """Ask the server to end a call early; its last frame still comes."""
        with self._changed:
            frame = self._wire.cancel(call)
        self._send(frame)

    def _open(self, fields: Mapping[str, Any], timeout: float) -> Call:
        patience = min(timeout, (fields.get("deadline_ms") or math.inf) / 1000)
        with self._changed:
            call, frame = self._wire.open(fields, give_up_at=time.monotonic() + patience)
        self._send(frame)
        return call

    def _read_once(self, timeout: float) -> None:
        """Wait for bytes and hand them to the wire. Called with the lock held, which is open while this waits."""
        end = time.monotonic() + timeout
        self._reading = True
        self._changed.release()
        data: bytes | None = None
        failure: OSError | None = None
        try:
            data = self._channel.receive(timeout)
        except OSError as error:
            data, failure = b"", error
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()
        if data:
            if not self._wire.heard:
                self._known.add(self._channel.address)
            cancels = self._wire.receive(data)
            if self._wire.closed:
                self._channel.shut()
            elif cancels:
                with contextlib.suppress(ConnectionFailed):
                    self._send(cancels, wait=False)  # a server may wait for us to read before it reads again
        elif data is not None and not self._wire.closed:
            self._end(failure, end)

    def _end(self, failure: OSError | None, end: float) -> None:
        """Note that the server ended the connection, and why. Called as `_read_once`; `end`: when its wait is over."""
        wire, channel = self._wire, self._channel
        reason = endpoints.broke(failure) if failure else endpoints.ended(channel.address, wire.heard)
        channel.shut()  # a server that stops waits for our end
        needs_tls = isinstance(failure, TlsFailed)
        try:
            if not (needs_tls or wire.heard or channel.address in self._known):
                now = time.monotonic()
                seconds = min(wire.ending(reason, now), self._timeouts.connect, end - now)
                self._changed.notify_all()
                self._changed.release()  # what is new goes elsewhere, and who leaves does not wait for this
                try:
                    channel.ask_for_tls(seconds)
                finally:
                    self._changed.acquire()
        except TlsFailed as error:
            reason, needs_tls = str(error), True
        finally:
            wire.lost(reason, needs_tls=needs_tls)
            self._changed.notify_all()

    def _send(self, data: bytes, *, wait: bool = True) -> None:
        if not data:
            return
        try:
            self._channel.send(data, wait=wait)
        except OSError as error:
            reason = endpoints.broke(error)
        else:
            return
        # A server that closed on us has said why, if only the bytes are read that came before the end.
        self.pump(lambda: bool(self._wire.closed) and not self._wire.asking, _LAST_WORDS_S)
        self._channel.shut()
        with self._changed:
            self._wire.lost(reason)
            self._changed.notify_all()
        raise self._wire.failure()


class Stream:
    """An answer on its way: iterate over its chunks, then look at `result`. Closing it early cancels the request."""

    def __init__(self, client: Client, call: Call, timeouts: Timeouts):
        self._client = client
        self._call = call
        self._timeouts = timeouts

    @property
    def result(self) -> Result | None:
        """How the answer ended; None before its end."""
        return self._call.result

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        call = self._call
        if call.abandoned and call.error is None:
            raise StopIteration
        first = not call.n_tokens
        timeout = self._timeouts.first_token if first else self._timeouts.between_tokens
        if not self._client.pump(call.readable, timeout):
            self.close()
            phase = "first token" if first else "next token"
            raise TimedOut(f"no {phase} within {timeout:g} s", phase=phase, tokens_received=call.n_tokens)
        chunk = call.take()
        if chunk is None:
            raise StopIteration
        return chunk

    def cancel(self) -> None:
        """Ask the server to stop; the iterator ends with what had been generated, and `result` says CANCELLED."""
        self._client.cancel(self._call)

    def close(self) -> None:
        """Stop reading; a request that still runs is cancelled. Closing twice is fine."""
        if not self._call.ended and not self._call.abandoned:
            self._client.abandon(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop left by `break` drops the stream without closing it; the server should not go on for nobody.
        self.close()
