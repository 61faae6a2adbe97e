"""Helpers for what goes wrong with prompts: repeated questions, turns that are too long, retrieval of changing length.

All are plain functions over texts. Owns no state; refuses sockets and asyncio.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zl.client.errors import BadRequest
from zl.client.messages import refuse_media

MARKER = "[TRUNCATED]"
"""What stands where a text was cut; the server uses the same."""


def dedupe(messages: Sequence[str]) -> list[str]:
    """Drop a last question that repeats the one before it, as after a double click or a resend after an error.

    A question that follows itself, or follows itself after an empty answer, is one question; the same question asked
    again after a real answer stays, since that asks for another answer. White space at the edges does not count.
    """
    turns = list(messages)
    while len(turns) >= 2:
        last = turns[-1].strip()
        if turns[-2].strip() == last:
            turns.pop()
        elif len(turns) >= 3 and not turns[-2].strip() and turns[-3].strip() == last:
            del turns[-2:]
        else:
            break
    return turns


def truncate(text: str, max_bytes: int, marker: str = MARKER) -> str:
    """Cut a text to at most `max_bytes` bytes of UTF-8, between characters; a cut text ends in the marker, inside them.

    Raises  ValueError: `max_bytes` cannot hold the marker
    """
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    room = max_bytes - len(marker.encode())
    if room < 0:
        raise ValueError(f"max_bytes is {max_bytes}: it must be at least {len(marker.encode())}, for {marker}")
    return data[:room].decode("utf-8", "ignore") + marker


def truncate_turns(messages: Sequence[str], max_bytes: int, marker: str = MARKER) -> list[str]:
    """Cut every turn that is too long; the turns keep their number and roles."""
    return [truncate(turn, max_bytes, marker) for turn in messages]


def retrieval_segment(passages: Iterable[str], size: int, joint: str = "\n\n", marker: str = MARKER) -> str:
    """Make a context of exactly `size` bytes of UTF-8 from passages, the best first: cut with the marker, or padded.

    A context of constant length keeps the prompt's length, and with it the time to the first token, from changing with
    what was found. Padding is spaces at the end, which the model's tokenizer packs into few tokens.

    Raises  ValueError: `size` cannot hold the marker
    """
    text = truncate(joint.join(passage.strip() for passage in passages if passage.strip()), size, marker)
    return text + " " * (size - len(text.encode()))


def from_chat(messages: Iterable[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Turn a chat of `{"role": …, "content": …}` objects into the system prompt and the turns.

    Raises  UnsupportedContent: an image, a sound or a file among them; BadRequest: roles that do not alternate
    """
    system: list[str] = []
    turns: list[str] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str):
            refuse_media(content, f"message {number}")
            content = _joined_parts(content, number)
        if role == "system" and not turns:
            system.append(content)
        elif role == ("user", "assistant")[len(turns) % 2]:
            turns.append(content)
        else:
            expected = ("user", "assistant")[len(turns) % 2]
            raise BadRequest(f"message {number} has role {role!r}, but the next turn must be {expected}'s: turns "
                             "alternate, and system messages come first")  # fmt: skip
    return "\n\n".join(system), turns


def _joined_parts(content: object, number: int) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise BadRequest(f"message {number} has no text content: {content!r}")
    return "".join(texts)
