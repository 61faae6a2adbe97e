"""Turn payloads into `Request` and `Response` objects and back; what a request may say is the matter of `rules`.

State: none. Refuses asyncio, torch, numpy and dispatch; the client imports it and must start fast.

What protobuf's upb backend does with a memoryview, measured with tracemalloc: from 7.36 it parses the view in place; up
to 7.35 it first made a `bytes` of the whole of it (bytes and bytearray were always read in place). Either way each
string field is copied once into upb's own memory and once more into the `bytes` that a field access returns, so nothing
here refers to the berth after `decode_request` returns. upb offers Python no aliasing that would save the first.

A server reads most requests through native code instead (zl/net/native), which takes only what it is sure to be valid
and gives the same `Request`. Whatever else comes is decoded here, accepted or refused by `rules`, and clients know only
this. The frame of one token is native too, with the bytes of `encode_token`.

Responses: a new message costs about 1.4 µs with serializing, a cleared and reused one 1.1 µs, and bytes put together by
hand in Python no less than that; 0.3 µs a frame does not buy mutable module state, so messages are made anew.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from zl.errors import Code, Finish, FrameError, PeerError, RequestError
from zl.net import schema_pb2
from zl.net.messages import Content, Encoding, Operation, Request, RequestType, Response, ServerInfo, Usage
from zl.shapes import HEADER_BYTES, TOKEN_BYTES

MICRO = 1_000_000
"""Sampling values travel as fixed32, multiplied by this."""

Decoder = Callable[[bytes | bytearray | memoryview], Request | None]
"""Takes a payload; gives the GENERATE request that it is where it surely passes `check_request` of `rules` (of
any number of turns), else None: `decode_request` and `check_request` decide. It refuses nothing (net/native)."""

TokenEncoder = Callable[[int, int, bytes, float | None, int | None], bytes]
"""`encode_token`, or the native code that makes the same bytes."""


def decode_request(payload: bytes | bytearray | memoryview) -> Request:
    """Parse a payload; the result holds nothing of it.

    Raises  FrameError: it is no `zl.Request`
    """
    try:
        m = schema_pb2.Request.FromString(payload)
    except DecodeError:
        raise FrameError(f"payload of {len(payload)} bytes is no zl.Request") from None
    # A slice is made in C, list() walks the container: a third of a microsecond for each. Likewise HasField costs two
    # field reads, so it is asked only where a value is zero.
    messages = m.messages[:]
    while messages and not messages[-1]:
        messages.pop()
    temperature, top_p, penalty, seed = m.temperature, m.top_p, m.repetition_penalty, m.seed
    has = m.HasField
    return Request(
        m.request_id,
        m.operation,
        m.encoding,
        m.system_prompt,
        messages,
        m.context,
        temperature / MICRO if temperature or has("temperature") else None,
        top_p / MICRO if top_p or has("top_p") else None,
        penalty / MICRO if penalty or has("repetition_penalty") else None,
        m.max_tokens,
        m.type,
        seed if seed or has("seed") else None,
        m.stop[:],
        m.deadline_ms,
        m.ignore_eos,
        m.logprobs,
        m.auth_token,
    )


def tokens_of(packed: Content) -> Sequence[int]:
    """View packed little-endian int32 ids as numbers, without a copy where the host is little-endian.

    Raises  RequestError: the byte count is no multiple of 4
    """
    if len(packed) % TOKEN_BYTES:
        raise RequestError(Code.BAD_REQUEST, odd_bytes(packed))
    if sys.byteorder == "little":
        return memoryview(packed).cast("i")
    ids = array("i", packed)
    ids.byteswap()
    return ids


def odd_bytes(packed: Content) -> str:
    """Say that packed ids are cut short."""
    return f"{len(packed)} bytes are no whole number of int32 token ids"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack ids the way a TOKENS request carries them.

    Raises  ValueError: an id does not fit an int32
    """
    ids = list(token_ids)
    try:
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error as error:
        raise ValueError(f"token ids must be integers that fit 32 bits: {error}") from None


# --- answers, server side ---------------------------------------------------------------------------------------------


def encode_tokens(
    request_id: int,
    token_ids: Sequence[int],
    text: bytes,
    logprobs: Sequence[float] | None = None,
    seed: int | None = None,
) -> bytes:
    """Make the frame of new tokens; `logprobs` None: not asked for; `seed` only on a request's first frame."""
    return _framed(
        schema_pb2.Response(request_id=request_id, token_ids=token_ids, text=text, logprobs=logprobs, seed=seed)
    )


def encode_token(request_id: int, token_id: int, text: bytes, logprob: float | None, seed: int | None) -> bytes:
    """Make the frame of one new token, the most frequent of all; None: not asked for, not a request's first frame."""
    return encode_tokens(request_id, [token_id], text, None if logprob is None else [logprob], seed)


def encode_last(
    request_id: int,
    token_ids: Sequence[int],
    text: bytes,
    logprobs: Sequence[float] | None,
    finish: Finish,
    usage: Usage | None,
    error: PeerError | None = None,
    seed: int | None = None,
) -> bytes:
    """Make a request's last frame, with what is left of its tokens and text."""
    m = schema_pb2.Response(
        request_id=request_id,
        token_ids=token_ids,
        text=text,
        logprobs=logprobs,
        seed=seed,
        is_finished=True,
        finish_reason=_number(finish),
    )
    if error is not None:
        _put_error(m, error)
    if usage is not None:
        # Called on the submessage so that it is present even when everything in it is zero.
        m.usage.CopyFrom(
            schema_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                constant_tokens=usage.constant_tokens,
                truncated=usage.truncated,
                queue_us=usage.queue_us,
                prefill_us=usage.prefill_us,
                decode_us=usage.decode_us,
                glue_us=usage.glue_us,
            )
        )
    return _framed(m)


def encode_error(error: PeerError, request_id: int | None = None) -> bytes:
    """Make the one frame that refuses a request or, with id 0, ends a connection; the id is the error's by default."""
    m = schema_pb2.Response(
        request_id=error.request_id if request_id is None else request_id,
        is_finished=True,
        finish_reason=_number(Finish.ERROR),
    )
    _put_error(m, error)
    return _framed(m)


def pack_server_info(info: ServerInfo) -> bytes:
    """Serialize what HELLO is answered with; made once, at start."""
    return schema_pb2.ServerInfo(**{name: getattr(info, name) for name in ServerInfo.__slots__}).SerializeToString()


def encode_server_info(request_id: int, info: bytes) -> bytes:
    """Make the answer to a HELLO from what `pack_server_info` made."""
    m = schema_pb2.Response(request_id=request_id, is_finished=True, server=schema_pb2.ServerInfo.FromString(info))
    return _framed(m)


def _put_error(m: schema_pb2.Response, error: PeerError) -> None:
    m.error.code = _number(error.code)
    # A message may quote what a peer sent; a lone surrogate in it would make the encoder raise.
    m.error.message = error.message.encode("utf-8", "backslashreplace").decode()
    m.error.retry_after_ms = error.retry_after_ms


def _number(value: int) -> Any:
    # The generated stubs want their own enum types, which do not exist at run time: there, fields take plain numbers.
    return int(value)


def _framed(m: schema_pb2.Response | schema_pb2.Request) -> bytes:
    payload = m.SerializeToString()
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


# --- client side ------------------------------------------------------------------------------------------------------


def encode_request(
    *,
    request_id: int,
    messages: Iterable[bytes | str] = (),
    system: bytes | str = b"",
    context: bytes | str = b"",
    temperature: float | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    max_tokens: int = 0,
    type: int = RequestType.CHAT,
    operation: int = Operation.GENERATE,
    encoding: int = Encoding.TEXT,
    seed: int | None = None,
    stop: Iterable[bytes | str] = (),
    deadline_ms: int = 0,
    ignore_eos: bool = False,
    logprobs: bool = False,
    auth_token: bytes | str = b"",
) -> bytes:
    """Make a request's frame; text is encoded as UTF-8, token ids come from `pack_tokens`, sampling values are plain.

    Raises  ValueError: a number does not fit its field
    """
    return _framed(
        schema_pb2.Request(
            request_id=request_id,
            system_prompt=_bytes(system),
            messages=[_bytes(turn) for turn in messages],
            context=_bytes(context),
            temperature=_micro("temperature", temperature),
            top_p=_micro("top_p", top_p),
            repetition_penalty=_micro("repetition_penalty", repetition_penalty),
            max_tokens=max_tokens,
            type=_number(type),
            operation=_number(operation),
            encoding=_number(encoding),
            seed=seed,
            stop=[_bytes(text) for text in stop],
            deadline_ms=deadline_ms,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            auth_token=_bytes(auth_token),
        )
    )


def _bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _micro(name: str, value: float | None) -> int | None:
    if value is None:
        return None
    if not 0 <= value <= (2**32 - 1) / MICRO:
        raise ValueError(f"{name}: {value} does not fit the wire, which carries 0 to {(2**32 - 1) / MICRO:g}")
    return round(value * MICRO)


def decode_response(payload: bytes | bytearray | memoryview) -> Response:
    """Parse a payload from a server; an error arrives as a value, to be raised by whoever waits for the request.

    Raises  FrameError: it is no `zl.Response`
    """
    try:
        m = schema_pb2.Response.FromString(payload)
    except DecodeError:
        raise FrameError(f"payload of {len(payload)} bytes is no zl.Response") from None
    error = usage = server = None
    if m.HasField("error"):
        error = _read_error(m.error, m.request_id)
    if m.HasField("usage"):
        u = m.usage
        usage = Usage(
            u.prompt_tokens,
            u.completion_tokens,
            u.constant_tokens,
            u.truncated,
            u.queue_us,
            u.prefill_us,
            u.decode_us,
            u.glue_us,
        )
    if m.HasField("server"):
        server = ServerInfo(**{name: getattr(m.server, name) for name in ServerInfo.__slots__})
    return Response(
        m.request_id,
        list(m.token_ids),
        list(m.logprobs),
        m.is_finished,
        m.text,
        Finish(m.finish_reason) if 0 <= m.finish_reason < len(Finish) else Finish.ERROR,
        error,
        usage,
        server,
        m.seed,
    )


def _read_error(m: schema_pb2.Error, request_id: int) -> PeerError:
    known = m.code in Code.__members__.values()
    code = Code(m.code) if known else Code.INTERNAL
    message = m.message if known else f"error code {m.code}, which this client does not know: {m.message}"
    return PeerError(code, message, request_id=request_id, retry_after_ms=m.retry_after_ms)
