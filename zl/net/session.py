"""The rules of one conversation (WIRE.md, conversation rules) as a table: frames and events in, actions out.

State: where the conversation stands, and the ids of its requests in flight. Sees no socket, clock or loop: what the
server is ready for comes as an argument with each event. Refuses asyncio, torch and dispatch.

Draining is a condition of the server, not of a connection: one that is idle stays open, so that a request already on
its way to us is answered DRAINING instead of meeting a reset; the server closes all of them when its drain ends.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from enum import Enum, auto

from zl.errors import Code, FrameError, InvariantError, PeerError, RequestError
from zl.net import codec, rules
from zl.net.messages import Operation, Request


class State(Enum):
    """Where a conversation stands."""

    NEW = auto()  # nothing has come yet
    NEW_LOCKED = auto()  # the same, and a HELLO with the token is needed
    OPEN = auto()
    LOCKED = auto()  # pinged, but still no HELLO with the token
    HALF_CLOSED = auto()  # the peer sends no more; answers are still delivered
    CLOSING = auto()  # the last words are said; what still comes in is ignored
    CLOSED = auto()


class Event(Enum):
    """What can happen to a conversation."""

    PING = auto()
    PING_UNREADY = auto()  # while draining, or with an unhealthy engine
    HELLO = auto()
    HELLO_REFUSED = auto()  # the token is wrong, or missing where it is needed
    GENERATE = auto()
    GENERATE_DRAINING = auto()
    CANCEL = auto()
    BROKEN = auto()  # framing error
    EOF = auto()  # between frames; inside one it is BROKEN
    IDLE = auto()  # the last request in flight has ended
    CLOSE = auto()  # the server wants to end it
    LOST = auto()  # the transport is gone


class Act(Enum):
    """What a transition asks for."""

    NOTHING = auto()
    PONG = auto()
    INFO = auto()
    SUBMIT = auto()
    TURN_AWAY = auto()
    CANCEL = auto()
    REFUSE = auto()  # UNAUTHENTICATED, then the end
    FAIL = auto()  # BAD_FRAME, then the end
    END = auto()  # no more words
    AWAIT = auto()  # end as soon as nothing is in flight


_TALKING = (State.NEW, State.NEW_LOCKED, State.OPEN, State.LOCKED)

TABLE: dict[tuple[State, Event], tuple[State, Act]] = {
    (State.NEW, Event.PING): (State.OPEN, Act.PONG),
    (State.NEW, Event.PING_UNREADY): (State.CLOSING, Act.END),
    (State.NEW, Event.HELLO): (State.OPEN, Act.INFO),
    (State.NEW, Event.GENERATE): (State.OPEN, Act.SUBMIT),
    (State.NEW, Event.GENERATE_DRAINING): (State.OPEN, Act.TURN_AWAY),
    (State.NEW, Event.CANCEL): (State.OPEN, Act.CANCEL),
    (State.NEW_LOCKED, Event.PING): (State.LOCKED, Act.PONG),
    (State.NEW_LOCKED, Event.PING_UNREADY): (State.CLOSING, Act.END),
    (State.NEW_LOCKED, Event.HELLO): (State.OPEN, Act.INFO),
    (State.NEW_LOCKED, Event.HELLO_REFUSED): (State.CLOSING, Act.REFUSE),
    (State.NEW_LOCKED, Event.GENERATE): (State.CLOSING, Act.REFUSE),
    (State.NEW_LOCKED, Event.GENERATE_DRAINING): (State.CLOSING, Act.REFUSE),
    (State.NEW_LOCKED, Event.CANCEL): (State.CLOSING, Act.REFUSE),
    (State.LOCKED, Event.PING): (State.LOCKED, Act.PONG),
    (State.LOCKED, Event.PING_UNREADY): (State.LOCKED, Act.PONG),
    (State.LOCKED, Event.HELLO): (State.OPEN, Act.INFO),
    (State.LOCKED, Event.HELLO_REFUSED): (State.CLOSING, Act.REFUSE),
    (State.LOCKED, Event.GENERATE): (State.CLOSING, Act.REFUSE),
    (State.LOCKED, Event.GENERATE_DRAINING): (State.CLOSING, Act.REFUSE),
    (State.LOCKED, Event.CANCEL): (State.CLOSING, Act.REFUSE),
    (State.OPEN, Event.PING): (State.OPEN, Act.PONG),
    (State.OPEN, Event.PING_UNREADY): (State.OPEN, Act.PONG),
    (State.OPEN, Event.HELLO): (State.OPEN, Act.INFO),
    (State.OPEN, Event.HELLO_REFUSED): (State.CLOSING, Act.REFUSE),
    (State.OPEN, Event.GENERATE): (State.OPEN, Act.SUBMIT),
    (State.OPEN, Event.GENERATE_DRAINING): (State.OPEN, Act.TURN_AWAY),
    (State.OPEN, Event.CANCEL): (State.OPEN, Act.CANCEL),
    (State.OPEN, Event.IDLE): (State.OPEN, Act.NOTHING),
    (State.HALF_CLOSED, Event.IDLE): (State.CLOSING, Act.END),
    (State.HALF_CLOSED, Event.CLOSE): (State.CLOSING, Act.END),
    (State.HALF_CLOSED, Event.LOST): (State.CLOSED, Act.NOTHING),
    (State.CLOSING, Event.EOF): (State.CLOSING, Act.NOTHING),
    (State.CLOSING, Event.CLOSE): (State.CLOSING, Act.NOTHING),
    (State.CLOSING, Event.LOST): (State.CLOSED, Act.NOTHING),
    (State.CLOSED, Event.CLOSE): (State.CLOSED, Act.NOTHING),
    **{(state, Event.BROKEN): (State.CLOSING, Act.FAIL) for state in _TALKING},
    **{(state, Event.EOF): (State.HALF_CLOSED, Act.AWAIT) for state in _TALKING},
    **{(state, Event.CLOSE): (State.CLOSING, Act.END) for state in _TALKING},
    **{(state, Event.LOST): (State.CLOSED, Act.NOTHING) for state in _TALKING},
}
"""(state, event) to (next state, what to do); a pair that is not here cannot happen, and raises."""


@dataclass(slots=True)
class Pong:
    """Answer a ping."""


@dataclass(slots=True)
class Info:
    """Answer a HELLO with the server's info."""

    request_id: int


@dataclass(slots=True)
class Send:
    """Send the frame of an error; `refused`: the request that ends with it and was never handed out as a Submit."""

    data: bytes
    code: Code  # not the error: its traceback would keep the frames that lead here, and their views of the berth
    refused: Request | None = None


@dataclass(slots=True)
class Submit:
    """Hand a checked request to the application."""

    request: Request


@dataclass(slots=True)
class Cancel:
    """End one request in flight."""

    request_id: int


@dataclass(slots=True)
class Close:
    """End the connection after what was sent; its requests in flight are cancelled."""


Action = Pong | Info | Send | Submit | Cancel | Close


class Session:
    """One conversation. Each method takes what happened and returns what is to be done, in order.

    auth_token  None or empty: no HELLO is needed
    decode      the fast way for valid requests; what it is not sure of goes through codec, as all does without it
    """

    __slots__ = ("_decode", "_in_flight", "_token", "state")

    def __init__(self, auth_token: bytes | None = None, decode: codec.Decoder | None = None):
        self._token = auth_token or None
        self._decode = decode
        self._in_flight: set[int] = set()
        self.state = State.NEW_LOCKED if self._token else State.NEW

    @property
    def n_in_flight(self) -> int:
        """Count the requests that have no last frame yet."""
        return len(self._in_flight)

    @property
    def ended(self) -> bool:
        """Say whether nothing more may be sent."""
        return self.state is State.CLOSING or self.state is State.CLOSED

    def ping(self, ready: bool) -> list[Action]:
        """Take a ping; `ready`: the server accepts requests and its engine is healthy."""
        act = self._step(Event.PING if ready else Event.PING_UNREADY)
        return [Pong()] if act is Act.PONG else self._end()

    def receive(self, payload: bytes | bytearray | memoryview, accepting: bool) -> list[Action]:
        """Take a frame's payload; only a request to be submitted may refer to it afterwards (`Request.in_berth`).

        accepting  the server is not draining
        """
        request = self._decode(payload) if self._decode is not None else None
        checked = request is not None
        if request is None:
            try:
                request = codec.decode_request(payload)
            except FrameError as error:
                return self.broken(error)
        match self._step(self._event_of(request, accepting)):
            case Act.SUBMIT:
                return self._submit(request, checked)
            case Act.CANCEL:
                return [Cancel(request.request_id)] if request.request_id in self._in_flight else []
            case Act.INFO:
                if request.request_id in self._in_flight:
                    return [_refusal(_duplicate(request), request)]
                return [Info(request.request_id)]
            case Act.TURN_AWAY:
                text = "the server is shutting down; ask another, or this one again later"
                return [_refusal(RequestError(Code.DRAINING, text), request)]
            case _:
                wrong = request.operation == Operation.HELLO and request.auth_token
                what = "not the one that this server asks for" if wrong else "this server asks for one"
                how = "send a HELLO with it first (clients: auth_token=, --auth-token-file or ZL_AUTH_TOKEN)"
                text = f"auth_token: {what}; {how}"
                return [_refusal(RequestError(Code.UNAUTHENTICATED, text), request), *self._end()]

    def broken(self, error: FrameError) -> list[Action]:
        """Take a framing error: say so once, and end."""
        self._step(Event.BROKEN)
        return [_error_frame(error, 0), *self._end()]

    def refused(self, request_id: int, error: RequestError) -> list[Action]:
        """Take the application's refusal of a request that it was just handed."""
        return [_error_frame(error, request_id), *self.finished(request_id)]

    def finished(self, request_id: int) -> list[Action]:
        """Take the end of a request whose last frame has been queued; its id may be used again.

        Raises  InvariantError: no request of that id is in flight
        """
        if self.ended:
            return []
        if request_id not in self._in_flight:
            raise InvariantError(f"session: request {request_id} finished without being in flight")
        self._in_flight.remove(request_id)
        if self._in_flight:
            return []
        return self._end() if self._step(Event.IDLE) is Act.END else []

    def eof(self) -> list[Action]:
        """Take the end of the peer's sending side, between frames."""
        act = self._step(Event.EOF)
        if act is Act.AWAIT and not self._in_flight:
            self._step(Event.IDLE)
            return self._end()
        return []

    def close(self) -> list[Action]:
        """Take the server's wish to end the conversation."""
        return self._end() if self._step(Event.CLOSE) is Act.END else []

    def lost(self) -> None:
        """Take the end of the transport."""
        self._step(Event.LOST)
        self._in_flight.clear()

    def _step(self, event: Event) -> Act:
        try:
            self.state, act = TABLE[self.state, event]
        except KeyError:
            raise InvariantError(f"session: {event.name} cannot happen in {self.state.name}") from None
        return act

    def _event_of(self, request: Request, accepting: bool) -> Event:
        if request.operation == Operation.CANCEL:
            return Event.CANCEL
        if request.operation == Operation.HELLO:
            return Event.HELLO if self._admits(request.auth_token) else Event.HELLO_REFUSED
        # An operation we do not know is refused by the field rules, once the peer may know that much.
        return Event.GENERATE if accepting else Event.GENERATE_DRAINING

    def _admits(self, token: bytes) -> bool:
        if self._token is None or (not token and self.state is State.OPEN):
            return True
        return hmac.compare_digest(token, self._token)  # in constant time: the first wrong byte must not show

    def _submit(self, request: Request, checked: bool) -> list[Action]:
        if request.request_id in self._in_flight:
            return [_refusal(_duplicate(request), request)]
        if not checked:
            try:
                rules.check_request(request, max_messages=None)
            except RequestError as error:
                return [_refusal(error, request)]
        self._in_flight.add(request.request_id)
        return [Submit(request)]

    def _end(self) -> list[Action]:
        self._in_flight.clear()
        return [Close()]


def _refusal(error: RequestError, request: Request) -> Send:
    return _error_frame(error, request.request_id, request)


def _error_frame(error: PeerError, request_id: int, refused: Request | None = None) -> Send:
    return Send(codec.encode_error(error, request_id), error.code, refused)


def _duplicate(request: Request) -> RequestError:
    text = f"request_id: {request.request_id} is in flight on this connection; choose another"
    return RequestError(Code.DUPLICATE_ID, text, field="request_id")
