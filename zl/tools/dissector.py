"""Explain every byte of one direction of a conversation, and find the first that is wrong.

Bytes in, lines out. Wrong is what the other side would refuse: a broken frame, a payload that is no message, and in
requests what the field rules of the codec forbid. What only a server can know is not judged: its limits, its auth
token, ids in flight, and the vocabulary unless its size is given.
State: none. Refuses sockets.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from zl.client.wire import MAX_RESPONSE
from zl.errors import Code, FrameError, RequestError
from zl.net import codec, rules, schema_pb2
from zl.net.frames import payload_length
from zl.net.messages import Encoding, Operation, Request
from zl.shapes import HEADER_BYTES, MAX_FRAME, MAX_MESSAGES, MAX_STOPS, TOKEN_BYTES
from zl.tools.walker import Line, Place, Walker, Wrong

Side = Literal["client", "server"]

ANY_VOCAB = 2**31
"""With the vocabulary unknown, every id that is not negative may be right."""


class Problem(NamedTuple):
    """Something wrong at `offset`, in frame number `frame` (from 1); `code` is what a server answers."""

    offset: int
    text: str
    code: Code
    frame: int


class Dissection(NamedTuple):
    """A stream explained. `problems` are in the order of their frames; the first is the verdict."""

    side: Side
    lines: list[Line]
    problems: list[Problem]
    n_frames: int
    strange: int

    @property
    def wrong_at(self) -> int | None:
        """Offset of the first wrong byte; None: the stream is fine."""
        return self.problems[0].offset if self.problems else None


def dissect(
    data: bytes, side: Side | None = None, *, max_frame: int | None = None, vocab_size: int = ANY_VOCAB
) -> Dissection:
    """Explain a stream.

    side       who sent it; None: the side whose messages it resembles more
    max_frame  bytes; None: what that side's reader takes by default
    """
    if side is not None:
        return _dissect(data, side, max_frame, vocab_size)
    both = [_dissect(data, each, max_frame, vocab_size) for each in ("client", "server")]
    return min(both, key=lambda found: (sum(p.code == Code.BAD_FRAME for p in found.problems), found.strange,
                                        len(found.problems)))  # fmt: skip


def _dissect(data: bytes, side: Side, max_frame: int | None, vocab_size: int) -> Dissection:
    if max_frame is None:
        max_frame = MAX_FRAME if side == "client" else MAX_RESPONSE
    found = Dissection(side, [], [], 0, 0)
    lines, problems, strange, n_frames, at = found.lines, found.problems, 0, 0, 0
    while at < len(data):
        n_frames += 1
        header = data[at : at + HEADER_BYTES]
        if len(header) < HEADER_BYTES:
            text = f"the data ends here, {HEADER_BYTES - len(header)} bytes before the end of the frame's length"
            _break(lines, problems, Wrong(len(data), text), at, len(data), n_frames, 0)
            break
        try:
            length = payload_length(header, max_frame)
        except FrameError as error:
            _break(lines, problems, Wrong(at, str(error)), at, len(data), n_frames, 0)
            break
        what = f"{length} bytes of payload" if length else "ping"
        lines.append(Line(at, HEADER_BYTES, 0, f"frame {n_frames}", "length", what))
        at += HEADER_BYTES
        end = at + length
        if length:
            message = schema_pb2.Request.DESCRIPTOR if side == "client" else schema_pb2.Response.DESCRIPTOR
            walker = Walker(data, at, end, message)
            try:
                walker.walk()
                lines += walker.lines
                problem = _judge(data[at:end], side, walker.places, end, vocab_size)
                if problem is not None:
                    problems.append(problem._replace(frame=n_frames))
                    _mark(lines, problems[-1])
            except Wrong as wrong:
                lines += walker.lines
                _break(lines, problems, wrong, at, min(end, len(data)), n_frames, walker.depth)
            strange += walker.strange
        at = end
    return found._replace(n_frames=n_frames, strange=strange)


def _break(
    lines: list[Line], problems: list[Problem], wrong: Wrong, start: int, end: int, frame: int, depth: int
) -> None:
    """Explain what cannot be read on from `wrong`, up to `end`; the lines of this frame's payload begin at `start`."""
    done = max(start, lines[-1].offset + lines[-1].size) if lines else start
    if wrong.offset > done:
        lines.append(Line(done, wrong.offset - done, depth, "begun", "", "not whole"))
    at = max(wrong.offset, done)
    lines.append(Line(at, end - at, depth, "wrong", "", "", wrong.text))
    problems.append(Problem(wrong.offset, wrong.text, Code.BAD_FRAME, frame))


def _mark(lines: list[Line], problem: Problem) -> None:
    """Put a problem beside the bytes that it is about, or after the last where something is missing."""
    for i in range(len(lines) - 1, -1, -1):
        line = lines[i]
        if line.depth == 1 and line.offset <= problem.offset <= line.offset + line.size:
            if problem.offset < line.offset + line.size or line.value == "0 bytes":
                lines[i] = line._replace(problem=f"{problem.code.name}: {problem.text}")
                return
            break
    lines.append(Line(problem.offset, 0, 1, "missing", "", "", f"{problem.code.name}: {problem.text}"))


def _judge(payload: bytes, side: Side, places: dict[str, Place], end: int, vocab_size: int) -> Problem | None:
    """Ask the codec and the field rules about a well-formed payload."""
    start = end - len(payload)
    try:
        if side == "server":
            codec.decode_response(payload)
            return None
        request = codec.decode_request(payload)
        if request.operation in (Operation.CANCEL, Operation.HELLO):
            return None
        rules.check_request(request, max_messages=None)
        rules.check_request(request)  # the limit on turns comes after the field rules: a server's policy rules on it
        rules.check_tokens(request, vocab_size)
    except FrameError as error:
        # The walker found nothing, the library did: say so rather than call it fine.
        return Problem(start, f"the protobuf library refuses this payload: {error}", error.code, 0)
    except RequestError as error:
        return Problem(_locate(error.field, request, places, end, vocab_size), str(error), error.code, 0)
    return None


def _locate(field: str, request: Request, places: dict[str, Place], end: int, vocab_size: int) -> int:
    """Find the byte that a field rule is about; `end` of the payload where something is missing."""
    if field == "messages":
        n_turns = len(request.messages)
        field = f"messages[{MAX_MESSAGES if n_turns > MAX_MESSAGES else n_turns - 1}]"
    elif field == "stop":
        field = f"stop[{MAX_STOPS}]"
    place = places.get(field)
    if place is None:
        return end
    content = place.content
    if field.startswith(("system_prompt", "messages", "context", "stop")):
        if request.encoding == Encoding.TEXT or field.startswith("stop"):
            try:
                content.decode()
            except UnicodeDecodeError as error:
                return place.offset + error.start
        elif len(content) % TOKEN_BYTES:
            return place.offset + len(content) // TOKEN_BYTES * TOKEN_BYTES
        else:
            ids = codec.tokens_of(content)
            wrong = next((i for i, token in enumerate(ids) if not 0 <= token < vocab_size), 0)
            return place.offset + wrong * TOKEN_BYTES
    return place.offset
