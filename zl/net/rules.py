"""Hold requests to the field rules (WIRE.md, 7 and 9): what each field may say, and the words where it says otherwise.

State: none. Refuses asyncio, torch, numpy and dispatch; clients do not need it.

What zl/net/native takes as valid is valid by these rules, which it has a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn

from zl.errors import Code, RequestError
from zl.net.codec import MICRO, odd_bytes, tokens_of
from zl.net.messages import Content, Encoding, Operation, Request, RequestType
from zl.shapes import MAX_MESSAGES, MAX_STOP_BYTES, MAX_STOPS, TOKEN_BYTES

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 100.0

_LAST_OPERATION, _LAST_ENCODING, _LAST_TYPE = (len(kind) - 1 for kind in (Operation, Encoding, RequestType))


def check_request(request: Request, max_messages: int | None = MAX_MESSAGES) -> None:
    """Hold a GENERATE request to the field rules; the vocabulary is `check_tokens`' matter.

    max_messages  None: the application rules on conversations of more than MAX_MESSAGES turns
    Raises  RequestError: LIMIT_EXCEEDED or BAD_REQUEST, naming the field
    """
    if not (
        0 <= request.operation <= _LAST_OPERATION
        and 0 <= request.encoding <= _LAST_ENCODING
        and 0 <= request.type <= _LAST_TYPE
    ):
        _check_enum(request, "operation", request.operation, Operation)
        _check_enum(request, "encoding", request.encoding, Encoding)
        _check_enum(request, "type", request.type, RequestType)
    n_turns = len(request.messages)
    if max_messages is not None and n_turns > max_messages:
        _refuse(request, Code.LIMIT_EXCEEDED, "messages", f"{n_turns} turns, the limit is {max_messages}")
    if not n_turns:
        _refuse(request, Code.BAD_REQUEST, "messages", "the conversation is empty; send at least one user turn")
    if n_turns % 2 == 0 and n_turns <= MAX_MESSAGES:
        _refuse(
            request, Code.BAD_REQUEST, "messages", f"turn {n_turns - 1}, the last, is the assistant's, not a user's"
        )
    if len(request.stop) > MAX_STOPS:
        _refuse(request, Code.LIMIT_EXCEEDED, "stop", f"{len(request.stop)} stop strings, the limit is {MAX_STOPS}")
    for i, stop in enumerate(request.stop):
        name = f"stop[{i}]"
        if len(stop) > MAX_STOP_BYTES:
            _refuse(request, Code.LIMIT_EXCEEDED, name, f"{len(stop)} bytes, the limit is {MAX_STOP_BYTES}")
        if not stop:
            _refuse(request, Code.BAD_REQUEST, name, "an empty stop string matches everywhere; leave it out")
        _check_utf8(request, name, stop)
    if not request.encoding:  # TEXT
        # Most text is ASCII, which one C call a field tells; only what is left is looked at by name.
        fields = (request.system, request.context, *request.messages)
        if not all(isinstance(text, bytes) and text.isascii() for text in fields):
            _check_fields(request, _check_utf8)
    else:
        _check_fields(request, _check_whole_tokens)
    _check_sampling(request)


def _check_fields(request: Request, check: Callable[[Request, str, Content], None]) -> None:
    check(request, "system_prompt", request.system)
    for i, turn in enumerate(request.messages):
        check(request, f"messages[{i}]", turn)
    check(request, "context", request.context)


def _check_sampling(request: Request) -> None:
    temperature, top_p, penalty = request.temperature, request.top_p, request.repetition_penalty
    if temperature is not None and temperature > MAX_TEMPERATURE:
        _refuse_value(request, "temperature", temperature, f"0 to {MAX_TEMPERATURE:g}")
    # 0 is served: the smallest set that reaches it is the single most likely token.
    if top_p is not None and top_p > 1.0:
        _refuse_value(request, "top_p", top_p, "0 to 1")
    if penalty is not None and not 0.0 < penalty <= MAX_PENALTY:
        _refuse_value(request, "repetition_penalty", penalty, f"above 0, up to {MAX_PENALTY:g}")


def check_tokens(request: Request, vocab_size: int) -> None:
    """Hold the token ids of a TOKENS request to the vocabulary; a TEXT request passes.

    Raises  RequestError: BAD_REQUEST, naming field, index and id
    """
    if request.encoding != Encoding.TOKENS:
        return
    named = [("system_prompt", request.system), ("context", request.context)]
    named += [(f"messages[{i}]", turn) for i, turn in enumerate(request.messages)]
    for name, packed in named:
        if not packed:
            continue
        _check_whole_tokens(request, name, packed)
        ids = tokens_of(packed)
        if min(ids) >= 0 and max(ids) < vocab_size:
            continue
        index, token = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        _refuse(
            request,
            Code.BAD_REQUEST,
            name,
            f"token {token} at index {index} is outside the vocabulary, 0 to {vocab_size - 1}",
        )


def _check_enum(request: Request, name: str, value: int, kind: type[IntEnum]) -> None:
    if not 0 <= value < len(kind):
        known = ", ".join(f"{member.value} {member.name}" for member in kind)
        _refuse(request, Code.BAD_REQUEST, name, f"unknown value {value}; this server knows {known}")


def _check_utf8(request: Request, name: str, content: Content) -> None:
    text = bytes(content)
    if text.isascii():
        return
    try:
        text.decode()
    except UnicodeDecodeError as error:
        _refuse(request, Code.BAD_REQUEST, name, f"invalid UTF-8 at byte {error.start}")


def _check_whole_tokens(request: Request, name: str, packed: Content) -> None:
    if len(packed) % TOKEN_BYTES:
        _refuse(request, Code.BAD_REQUEST, name, odd_bytes(packed))


def _refuse_value(request: Request, name: str, value: float, allowed: str) -> NoReturn:
    text = f"{value:g} is outside the allowed range, {allowed} (the wire carries the value times {MICRO})"
    _refuse(request, Code.BAD_REQUEST, name, text)


def _refuse(request: Request, code: Code, name: str, text: str) -> NoReturn:
    raise RequestError(code, f"{name}: {text}", request_id=request.request_id, field=name)
