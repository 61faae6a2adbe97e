"""What a caller hands in and gets back: options, chunks, answers; and their way into the fields of a request.

Owns no state; the classes are NamedTuples, which cost the import a tenth of what dataclasses do.
Refuses asyncio, sockets, and whatever is heavier than the codec.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Self, TypedDict, cast

from zl.client.errors import BadRequest, UnsupportedContent
from zl.errors import Finish
from zl.net.codec import Encoding, RequestType, ServerInfo, Usage, pack_tokens

Turn = str | bytes | Sequence[int]
"""One chat message: text, UTF-8 bytes, or token ids."""

Messages = str | bytes | Sequence[Turn]
"""A conversation: user, assistant, user, and so on; one text alone is the user's."""


class Options(TypedDict, total=False):
    """What `stream` and `ask` take beside the messages; whatever is left out is the server's choice."""

    system: Turn  # the system prompt
    type: str | int  # sampling profile: "chat", "summarize" or "creative"
    temperature: float  # 0 is greedy
    top_p: float
    repetition_penalty: float  # 1 is off
    max_tokens: int
    seed: int  # makes the answer repeatable on the same build
    stop: str | bytes | Sequence[str | bytes]  # at most 4, 64 bytes each
    context: Turn  # retrieved text for this request
    deadline_ms: int  # counted from the request's arrival at the server
    ignore_eos: bool
    logprobs: bool


class _Timeouts(NamedTuple):
    connect: float
    first_token: float
    between_tokens: float


class Timeouts(_Timeouts):
    """How long the client waits, in seconds above 0; `math.inf` waits for ever.

    Raises  ValueError: one is 0, below it, or no number
    """

    __slots__ = ()

    def __new__(cls, connect: float = 5.0, first_token: float = 120.0, between_tokens: float = 60.0) -> Self:
        """Check them: none can be kept at 0, and NaN would wait for ever here and not at all there."""
        made = super().__new__(cls, connect, first_token, between_tokens)
        for name, value in zip(made._fields, made, strict=True):
            if not value > 0:
                raise ValueError(f"timeout of {value!r} ({name}): it must be seconds above 0; math.inf waits for ever")
        return made

    @classmethod
    def of(cls, value: float | Timeouts | None) -> Timeouts:
        """Take one number for all three, None for the defaults."""
        if value is None:
            return cls()
        return value if isinstance(value, Timeouts) else cls(value, value, value)


class Chunk(NamedTuple):
    """One frame of an answer. `logprobs` is empty unless asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


class Result(NamedTuple):
    """How an answer ended. `usage` is None where the server sent none."""

    finish_reason: Finish
    usage: Usage | None
    seed: int


UNSENT = Result(Finish.CANCELLED, None, 0)
"""How an answer ended that was cancelled while no server had its request."""


class Answer(NamedTuple):
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Finish
    usage: Usage | None
    seed: int

    def __str__(self) -> str:
        return self.text


def join(chunks: Iterable[Chunk], result: Result) -> Answer:
    """Put the chunks of an answer together."""
    parts = list(chunks)
    return Answer(
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(value for part in parts for value in part.logprobs),
        finish_reason=result.finish_reason,
        usage=result.usage,
        seed=result.seed,
    )


def request_fields(messages: Messages, options: Options) -> dict[str, Any]:
    """Turn messages and options into fields of the wire's Request.

    Raises  BadRequest: an option that does not exist or cannot be put on the wire; the server judges the rest
    """
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise BadRequest(f"unknown option {sorted(unknown)[0]!r}: there are {', '.join(Options.__annotations__)}")
    turns: Sequence[Turn] = (messages,) if isinstance(messages, str | bytes) else _turns(messages)
    texts = {"system": options.get("system"), "context": options.get("context")}
    for i, turn in enumerate(turns):
        refuse_media(turn, f"messages[{i}]")
    for name, text in texts.items():
        refuse_media(text, name)
    given = [*turns, *(value for value in texts.values() if value is not None and value not in ("", b""))]
    in_tokens = any(not isinstance(value, str | bytes) for value in given)
    if in_tokens and any(isinstance(value, str | bytes) for value in given):
        raise BadRequest("messages, system and context must be all text or all token ids")
    fields: dict[str, Any] = {"messages": [_turn(turn, f"messages[{i}]") for i, turn in enumerate(turns)]}
    fields |= {name: _turn(value, name) for name, value in texts.items() if value is not None}
    if in_tokens:
        fields["encoding"] = Encoding.TOKENS
    for name in ("temperature", "top_p", "repetition_penalty"):
        if (value := options.get(name)) is not None:
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise BadRequest(f"{name} is {value!r}: it must be a number")
            fields[name] = value
    for name, high in (("max_tokens", 2**32 - 1), ("deadline_ms", 2**32 - 1), ("seed", 2**64 - 1)):
        if (value := options.get(name)) is not None:
            if not isinstance(value, int) or not 0 <= value <= high:
                raise BadRequest(f"{name} is {value!r}: it must be a whole number from 0 to {high}")
            fields[name] = value
    if stop := options.get("stop"):
        stops = (stop,) if isinstance(stop, str | bytes) else stop
        if not isinstance(stops, Collection) or not all(isinstance(each, str | bytes) for each in stops):
            raise BadRequest(f"stop is {stop!r:.80}: it must be a text, or a list of texts")
        fields["stop"] = [_turn(each, "stop") for each in stops]
    if (profile := options.get("type")) is not None:
        fields["type"] = _profile(profile)
    fields |= {name: True for name in ("ignore_eos", "logprobs") if options.get(name)}
    return fields


_MEDIA_STARTS = {b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image", b"GIF8": "a GIF image",
                 b"RIFF": "a WAV or WebP file", b"%PDF": "a PDF file", b"ID3": "an MP3 file"}  # fmt: skip


def refuse_media(value: object, where: str) -> None:
    """Refuse what holds no text: parts of a multimodal chat, and bytes that begin like an image, a sound or a PDF.

    Raises  UnsupportedContent: which it is and what can be sent instead; BadRequest: a chat object, which has a helper
    """
    found = ""
    if isinstance(value, bytes):
        found = next((name for start, name in _MEDIA_STARTS.items() if value.startswith(start)), "")
    elif isinstance(value, Mapping):
        if "role" in value and not isinstance(value.get("content"), list):
            raise BadRequest(f"{where} is a chat object: turn the chat into system prompt and turns with "
                             "zl.client.helpers.from_chat(messages)")  # fmt: skip
        found = f"a part of type {value.get('type', 'unknown')!r}"
        if isinstance(value.get("content"), list):
            refuse_media(value["content"], where)
    elif isinstance(value, list | tuple):
        part = next((each for each in value if isinstance(each, Mapping) and each.get("type") != "text"), None)
        found = f"a part of type {part.get('type', 'unknown')!r}" if part is not None else ""
    if found:
        raise UnsupportedContent(f"{where} has {found}: zl serves text models only. A turn can be str, bytes "
                                 "of UTF-8 or a list of token ids; send a description or extracted text")  # fmt: skip


def _turns(messages: object) -> Sequence[Turn]:
    """Give the turns of a conversation; BadRequest: it is none."""
    refuse_media(messages if isinstance(messages, Mapping) else None, "messages")
    if isinstance(messages, Mapping | Set) or not isinstance(messages, Collection):
        raise BadRequest(f"messages is {messages!r:.80}: it must be a question (str or bytes of UTF-8), or a list of "
                         "the turns of a conversation, the user's first")  # fmt: skip
    return cast("Sequence[Turn]", messages)


def _turn(value: Turn, where: str) -> bytes:
    try:
        if isinstance(value, str):
            return value.encode()
        return value if isinstance(value, bytes) else pack_tokens(value)
    except UnicodeEncodeError as error:
        raise BadRequest(f"{where} has a lone surrogate at {error.start}: it is no Unicode text") from error
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{where} is {value!r:.80}, neither text nor a list of token ids: {error}") from error


def _profile(value: str | int) -> int:
    if isinstance(value, int):
        return value
    if not isinstance(value, str) or value.upper() not in RequestType.__members__:
        raise BadRequest(f"type is {value!r}: it must be one of {', '.join(RequestType.__members__).lower()}")
    return int(RequestType[value.upper()])


__all__ = [
    "Answer",
    "Chunk",
    "Messages",
    "Options",
    "Result",
    "ServerInfo",
    "Timeouts",
    "Turn",
    "Usage",
    "join",
    "refuse_media",
    "request_fields",
]
