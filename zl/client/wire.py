"""The client's side of the conversation without I/O: requests in flight, and which answer belongs to which.

Bytes go in and come out; sockets, clocks, locks and loops are the callers' (sync.py, aio.py).
State: the calls in flight, what has come for each and was not read yet (bounded). Refuses asyncio and sockets.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from zl.client.errors import BadRequest, ConnectionFailed, StreamBroken, TlsFailed, ZlClientError, from_wire
from zl.client.messages import Chunk, Result, ServerInfo
from zl.errors import Code, Finish, PeerError
from zl.net.codec import Operation, Response, decode_response, encode_request
from zl.net.frames import PING, FrameDecoder, Payload

MAX_BUFFERED = 4_096
"""Frames of one answer that may wait to be read; a longer backlog cancels it."""

MAX_RESPONSE = 16 * 2**20
"""Longest frame taken from a server, bytes; the largest answer frame holds all tokens of an answer and its text."""


class Call:
    """One request in flight and what has come for it.

    give_up_at  when its caller waits no longer for a first word, in seconds of the callers' clock
    """

    __slots__ = ("abandoned", "chunks", "ended", "error", "give_up_at", "n_tokens", "request_id", "result", "seed",
                 "server", "wake")  # fmt: skip

    def __init__(self, request_id: int, wake: Callable[[], None] | None, give_up_at: float = math.inf):
        self.request_id = request_id
        self.wake = wake
        self.give_up_at = give_up_at
        self.chunks: deque[Chunk] = deque()
        self.n_tokens = 0
        self.seed = 0
        self.ended = False
        self.abandoned = False
        self.error: ZlClientError | None = None
        self.result: Result | None = None
        self.server: ServerInfo | None = None

    def readable(self) -> bool:
        """Say whether `take` has something to give or to raise."""
        return bool(self.chunks) or self.ended or self.abandoned

    def take(self) -> Chunk | None:
        """Give the next chunk, None at the end or where nobody reads on; raise what ended the answer otherwise."""
        if self.chunks:
            return self.chunks.popleft()
        if self.error is not None:
            raise self.error
        return None


class Wire:
    """Number the requests, sort the answers."""

    def __init__(self, max_buffered: int = MAX_BUFFERED):
        self._decoder = FrameDecoder(MAX_RESPONSE)
        self._calls: dict[int, Call] = {}
        self._next_id = 1
        self._max_buffered = max_buffered
        self._outgoing: list[bytes] = []
        self._pings = 0
        self._pongs = 0
        self._answered = False
        self.heard = False  # the server has said something, be it nonsense
        self.closed = ""
        self.asking = False  # it is gone, and the server is being asked why; see `ending`
        self._needs_tls = False

    @property
    def in_flight(self) -> int:
        """Requests whose last frame has not come."""
        return len(self._calls)

    @property
    def served(self) -> bool:
        """Say whether any answer has begun on this connection."""
        return self._answered or any(call.n_tokens for call in self._calls.values())

    @property
    def maybe_tls(self) -> bool:
        """Say whether the connection is gone because the server speaks TLS, or that is being found out."""
        return self.asking or self._needs_tls

    def open(
        self, fields: Mapping[str, Any], wake: Callable[[], None] | None = None, give_up_at: float = math.inf
    ) -> tuple[Call, bytes]:
        """Begin a request; return it and the frame to send. `wake` is called when something has come for it.

        give_up_at  until when its caller waits for a first word, in seconds of the callers' clock
        Raises  ConnectionFailed: the connection is gone; BadRequest: a field does not fit the wire
        """
        if self.closed:
            raise self.failure()
        call = Call(self._next_id, wake, give_up_at)
        try:
            frame = encode_request(request_id=call.request_id, **fields)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        self._next_id += 1
        self._calls[call.request_id] = call
        return call, frame

    def ping(self) -> tuple[int, bytes]:
        """Return a ping's number and frame.

        Raises  ConnectionFailed: the connection is gone
        """
        if self.closed:
            raise self.failure()
        self._pings += 1
        return self._pings, PING

    def ponged(self, number: int) -> bool:
        """Say whether the answer to a ping has come; they come in order."""
        return self._pongs >= number

    def cancel(self, call: Call) -> bytes:
        """Return the frame that ends the call early; its last frame still comes. Empty where it has ended."""
        if call.ended or self.closed:
            return b""
        return encode_request(request_id=call.request_id, operation=Operation.CANCEL)

    def abandon(self, call: Call) -> bytes:
        """Cancel a call whose answer nobody reads any more; what still comes for it is dropped."""
        frame = b"" if call.abandoned else self.cancel(call)
        call.abandoned = True
        call.chunks.clear()
        if call.wake is not None:
            call.wake()  # another task may be reading
        return frame

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the server; return bytes to send (cancels of answers that nobody reads)."""
        self.heard = True
        try:
            for event in self._decoder.feed(data):
                if isinstance(event, Payload):
                    self._take(decode_response(event.data))
                elif isinstance(event, PeerError):
                    raise event
                else:
                    self._pongs += 1
        except PeerError as error:
            self.lost(f"the server does not speak zl's protocol: {error}")
        sending, self._outgoing = b"".join(self._outgoing), []
        return sending

    def ending(self, reason: str, now: float) -> float:
        """Take nothing new: the server has ended the connection, and is to be asked why. `lost` must follow.

        Return how many seconds that may take: half of what the least patient caller has left, so that each hears of
        the end of the connection rather than of its own patience.
        """
        self.closed, self.asking = reason, True
        return (min((each.give_up_at for each in self._calls.values() if not each.abandoned), default=now) - now) / 2

    def lost(self, reason: str, *, needs_tls: bool = False) -> None:
        """End all calls: the connection is gone; `needs_tls`: since it had none, and no answer can have begun."""
        if not self.closed or (self.asking and needs_tls):
            self.closed, self._needs_tls = reason, needs_tls
        self.asking = False
        for call in list(self._calls.values()):
            if self._needs_tls:
                self._end(call, self.failure())
                continue
            text = f"the answer broke off after {call.n_tokens} tokens: {self.closed}"
            self._end(call, StreamBroken(text, tokens_received=call.n_tokens))

    def failure(self) -> ConnectionFailed:
        """Make the exception for the connection that is gone."""
        return (TlsFailed if self._needs_tls else ConnectionFailed)(self.closed)

    def _take(self, response: Response) -> None:
        call = self._calls.get(response.request_id)
        if call is None:
            if response.request_id == 0 and response.error is not None:
                # An answer to the connection, not to a request: the server is about to close it (WIRE.md, rule 2).
                failure = from_wire(response.error)
                self.closed = f"the server closed the connection: {failure}"
                for each in list(self._calls.values()):
                    self._end(each, from_wire(response.error, each.n_tokens))
            return
        call.seed = call.seed or response.seed
        call.server = response.server or call.server
        if (response.token_ids or response.text) and not call.abandoned:
            call.n_tokens += len(response.token_ids)
            text = response.text.decode("utf-8", "replace")
            call.chunks.append(Chunk(text, tuple(response.token_ids), tuple(response.logprobs)))
        if response.is_finished:
            error = response.error
            if error is None and response.finish == Finish.ERROR:
                error = PeerError(Code.INTERNAL, "the server ended the answer with an error that it did not name")
            if error is None or error.code == Code.OK:
                call.result = Result(response.finish, response.usage, call.seed)
                self._end(call, None)
            else:
                self._end(call, from_wire(error, call.n_tokens))
        elif len(call.chunks) > self._max_buffered:
            text = f"{self._max_buffered} frames of the answer wait unread: read streams side by side, or close them"
            self._outgoing.append(self.abandon(call))
            call.error, call.ended = StreamBroken(text, tokens_received=call.n_tokens), True
        if call.wake is not None:
            call.wake()

    def _end(self, call: Call, error: ZlClientError | None) -> None:
        self._calls.pop(call.request_id, None)
        self._answered = self._answered or call.n_tokens > 0 or call.result is not None
        call.ended = True
        call.error = call.error or error
        if call.wake is not None:
            call.wake()
