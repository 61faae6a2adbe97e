"""Cut a byte stream into frames and put payloads into frames (WIRE.md): bytes in, events out.

State: the bytes of the one frame that a `FrameDecoder` has begun. The server's hot path keeps that state in its berth
and uses only `payload_length`. Refuses asyncio, protobuf and torch, so that every tool can use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zl.errors import FrameError
from zl.shapes import HEADER_BYTES, MAX_FRAME

PING = bytes(HEADER_BYTES)
"""The whole frame of a ping: a length of zero and nothing after it."""


@dataclass(slots=True)
class Ping:
    """A frame without payload arrived."""


@dataclass(slots=True)
class Payload:
    """A frame with a payload arrived."""

    data: bytes


FrameEvent = Ping | Payload | FrameError


def frame(payload: bytes) -> bytes:
    """Put one payload into a frame; an empty one makes a ping."""
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def payload_length(header: bytes | bytearray | memoryview, max_frame: int = MAX_FRAME) -> int:
    """Read a header of exactly HEADER_BYTES bytes; 0 is a ping.

    Raises  FrameError: the length is over `max_frame`
    """
    length = int.from_bytes(header, "big")
    if length > max_frame:
        raise FrameError(
            foreign(header)
            or f"frame length {length} is over the limit of {max_frame} bytes: a message too long for this end "
            "(shorten it, or raise max_frame), or not zl's protocol"
        )
    return length


_HTTP_REQUEST = (
    "this is an HTTP request, and zl speaks frames of its own on this port (docs/protocol.md); metrics and health are "
    "on a port of their own, 9433 where none is set"
)
_HTTP_METHODS = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC", b"CONN", b"TRAC", b"PRI ")
_HTTP_ANSWER = (
    "this is HTTP: another server has this port, or it is the one of zl's metrics (9433 where none is set); "
    "zl's own is 7433 where none is set"
)
_HTTP_ANSWERS = (b"HTTP", b"<!DO", b"<htm", b"<HTM")  # a server that took our frame for HTTP/0.9 sends a bare page
_STARTS = dict.fromkeys(_HTTP_METHODS, _HTTP_REQUEST) | dict.fromkeys(_HTTP_ANSWERS, _HTTP_ANSWER) | {
    b"SSH-": "this is SSH: another server has this port; zl's is 7433 where none is set",
}
_TLS_HANDSHAKE = b"\x16\x03"  # a record of type handshake, version 3.x (RFC 8446, section 5.1)


def foreign(header: bytes | bytearray | memoryview) -> str:
    """Say what else begins with this header, and what to do; "" where it is nothing that is known.

    Read as a length each of these is above every max_frame that can be set.
    """
    start = bytes(header)
    if start.startswith(_TLS_HANDSHAKE):
        return "this is a TLS handshake, and this address speaks plain frames: write tcp: or unix: for it, not tls:"
    return _STARTS.get(start, "")


def cut_short(n_received: int, n_expected: int) -> FrameError:
    """Describe a stream that ended inside a frame; counts are of the header or of the payload, in bytes."""
    return FrameError(f"the stream ended inside a frame: {n_received} of {n_expected} bytes arrived")


class FrameDecoder:
    """Turn chunks of any size into frame events; for clients and tools, which may copy.

    A FrameError is the last event: what follows a broken frame has no meaning and is ignored.
    """

    __slots__ = ("_held", "_max_frame", "failed")

    def __init__(self, max_frame: int = MAX_FRAME):
        self._max_frame = max_frame
        self._held = bytearray()  # less than one whole frame
        self.failed = False

    def feed(self, data: bytes | bytearray | memoryview) -> list[FrameEvent]:
        """Take the next bytes of the stream and return the frames that they complete, in order."""
        events: list[FrameEvent] = []
        if self.failed:
            return events
        if not self._held:
            at = self._cut(data, events)
            self._held += data[at:]
        else:
            self._held += data
            del self._held[: self._cut(self._held, events)]
        return events

    def _cut(self, data: bytes | bytearray | memoryview, events: list[FrameEvent]) -> int:
        """Append the whole frames at the start of `data` to `events`; return how many bytes they took."""
        at, end = 0, len(data)
        with memoryview(data) as view:
            while end - at >= HEADER_BYTES:
                body = at + HEADER_BYTES
                try:
                    # Not a view: the error's traceback would hold it, and with it `_held` from changing its size.
                    length = payload_length(bytes(view[at:body]), self._max_frame)
                except FrameError as error:
                    self.failed = True
                    events.append(error)
                    return end
                if body + length > end:
                    break
                events.append(Payload(bytes(view[body : body + length])) if length else Ping())
                at = body + length
        return at

    def eof(self) -> FrameError | None:
        """Say what is wrong with a stream that ends here: None between frames."""
        held = self._held
        if not held:
            return None
        self.failed = True
        if len(held) < HEADER_BYTES:
            return cut_short(len(held), HEADER_BYTES)
        return cut_short(len(held) - HEADER_BYTES, int.from_bytes(held[:HEADER_BYTES], "big"))
