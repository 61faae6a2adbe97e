"""Turn token ids into whole UTF-8 text, piece by piece, and find stop strings.

The text of an answer is that of all its tokens' bytes, decoded once (invalid bytes become U+FFFD as Python's "replace"
decides); a stream gives the same text in pieces that never split a character and never show a part of a stop string.

State: per answer, the bytes of an unfinished character and the text held back. Refuses: asyncio, torch, zl.net.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from zl.errors import Code, ModelError, RequestError
from zl.shapes import MAX_STOP_BYTES, MAX_STOPS
from zl.text.tokenizer import TextModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "▁"
_DECODER = codecs.getincrementaldecoder("utf-8")


class TokenTable:
    """The bytes that each token stands for: byte-level BPE, and SentencePiece with byte fallback.

    Control tokens and ids without a token (padding of the vocabulary) stand for nothing. Where the vocabulary puts a
    blank before a text, the first token of an answer loses it, as in `tokenizer.decode` of the answer's tokens.
    Raises   ModelError: a decoder that zl does not know
    """

    def __init__(self, model: TextModel):
        steps = _decoder_steps(model)
        kinds = [step["type"] for step in steps]
        byte_level = kinds == ["ByteLevel"]
        if not byte_level and not _is_sentencepiece(steps):
            raise ModelError(
                f"the tokenizer's decoder is {kinds or 'missing'}; zl reads ByteLevel (byte-level BPE) and those of "
                "SentencePiece (Replace, ByteFallback, Fuse, Strip, or Metaspace)"
            )
        n_strip = sum(step["start"] for step in steps if step["type"] == "Strip")
        metaspace = any(s["type"] == "Metaspace" and s.get("prepend_scheme", "always") != "never" for s in steps)
        added = model.tokenizer.get_added_tokens_decoder()
        alphabet = {char: byte for byte, char in enumerate(_byte_alphabet())}
        by_id = {index: token for token, index in model.tokenizer.get_vocab(with_added_tokens=True).items()}
        pieces: list[bytes] = []
        first: dict[int, bytes] = {}
        for token_id in range(max([model.vocab_size - 1, *by_id]) + 1):
            token = by_id.get(token_id)
            if token is None or token_id in model.control_ids:
                pieces.append(b"")
            elif byte_level:
                spelled = token_id not in added and all(char in alphabet for char in token)
                pieces.append(bytes(alphabet[char] for char in token) if spelled else token.encode())
            elif "ByteFallback" in kinds and (byte := _BYTE_TOKEN.fullmatch(token)):
                pieces.append(bytes([int(byte[1], 16)]))
                if n_strip and pieces[-1] == b" ":
                    first[token_id] = b""
            else:
                text = token.replace(_BLANK, " ")
                pieces.append(text.encode())
                if metaspace:  # this decoder takes every blank out of the first token
                    first[token_id] = token.replace(_BLANK, "").encode()
                elif n_strip and text.startswith(" "):
                    first[token_id] = text[1:].encode()
        self.pieces: Sequence[bytes] = tuple(pieces)
        """By token id, the bytes it adds to a text."""
        self.first = first
        """Tokens that stand for other bytes at the start of an answer."""
        self.control_ids = model.control_ids

    @classmethod
    def of(cls, pieces: Sequence[bytes], first: dict[int, bytes], control_ids: frozenset[int]) -> TokenTable:
        """Make a table from what another one held (zl.text.frozen)."""
        table = cls.__new__(cls)
        table.pieces, table.first, table.control_ids = tuple(pieces), first, control_ids
        return table

    def text_of(self, ids: Iterable[int]) -> bytes:
        """Return the UTF-8 text of a whole answer."""
        stream = TextStream(self)
        return b"".join([*map(stream.push, ids), stream.finish()])


class TextStream:
    """The text of one answer, token by token.

    stops    UTF-8, each 1 to MAX_STOP_BYTES bytes, at most MAX_STOPS
    Raises   RequestError: `stop` breaks one of these

    Of several stop strings the one that is complete first ends the answer (of two complete at once, the longer),
    however the text is spread over tokens; nothing from its start on is given out.
    """

    __slots__ = (
        *("_decoder", "_first", "_held", "_pieces", "_plain", "_starts", "_stops", "_table", "_without_start"),
        "stopped",
    )

    def __init__(self, table: TokenTable, stops: Sequence[bytes] = ()):
        self._table = table
        self._pieces = table.pieces
        self._decoder = _DECODER("replace")
        self._stops = tuple(stops)
        self._starts = _stop_starts(self._stops)
        self._without_start = frozenset(stop[0] for stop in self._stops).isdisjoint
        self._held = b""
        self._first = bool(table.first)
        self._plain = not self._first
        self.stopped = False
        """A stop string was found; the answer has ended."""

    @property
    def stops(self) -> tuple[bytes, ...]:
        """The stop strings."""
        return self._stops

    def push(self, token_id: int) -> bytes:
        """Take the next token; return the text that is certain now (whole characters, perhaps none)."""
        try:
            piece = self._pieces[token_id]
        except IndexError:  # padding of the vocabulary beyond the table
            return b""
        # The short way, with nothing held back or unfinished, and no stop string that could start in this piece.
        if self._plain and piece.isascii() and (not self._stops or self._without_start(piece)):
            return piece
        return self._push(piece, token_id)

    def _push(self, piece: bytes, token_id: int) -> bytes:
        if self._first:
            if token_id in self._table.control_ids:
                return b""
            self._first = False
            piece = self._table.first.get(token_id, piece)
        text = self._decoder.decode(piece).encode()
        if self._stops:
            text = self._search(text)
        self._plain = not (self._held or self.stopped or self._decoder.getstate()[0])
        return text

    def finish(self) -> bytes:
        """Return what was held back: the answer ends here. An unfinished character becomes U+FFFD."""
        text = self._search(self._decoder.decode(b"", True).encode())
        held, self._held = self._held, b""
        return text + held

    def _search(self, text: bytes) -> bytes:
        if self.stopped or not text:
            return b""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = b""
            return text[: min(found)[1]]
        cut = len(text)
        if text.endswith(self._starts):
            cut -= next(len(start) for start in self._starts if text.endswith(start))
        self._held = text[cut:]
        return text[:cut]


def _stop_starts(stops: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return every proper start of a stop string that ends between characters, the longest first."""
    if not stops:
        return ()
    if len(stops) > MAX_STOPS:
        raise RequestError(Code.LIMIT_EXCEEDED, f"stop: {len(stops)} stop strings, {MAX_STOPS} allowed", field="stop")
    starts = set()
    for index, stop in enumerate(stops):
        name = f"stop[{index}]"
        if not 1 <= len(stop) <= MAX_STOP_BYTES:
            found = f"{name}: {len(stop)} bytes, 1 to {MAX_STOP_BYTES} allowed"
            raise RequestError(Code.LIMIT_EXCEEDED, found, field=name)
        try:
            text = stop.decode()
        except UnicodeDecodeError as error:
            raise RequestError(Code.BAD_REQUEST, f"{name}: no UTF-8 at byte {error.start}", field=name) from error
        starts |= {text[:n].encode() for n in range(1, len(text))}
    return tuple(sorted(starts, key=len, reverse=True))


def _decoder_steps(model: TextModel) -> list[dict[str, Any]]:
    decoder = model.tokenizer.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    kinds = [step["type"] for step in steps]
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} or kinds.count("Strip") > 1:
        return False
    for step in steps:
        if step["type"] == "Replace" and (step["pattern"] != {"String": _BLANK} or step["content"] != " "):
            return False
        if step["type"] == "Strip" and (step["content"] != " " or step["start"] > 1 or step["stop"]):
            return False
    return "Replace" in kinds or "Metaspace" in kinds


def _byte_alphabet() -> list[str]:
    """Spell each byte by one printable character as GPT-2's vocabulary does: itself, or the next free from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spelled, free = [], 0x100
    for byte in range(256):
        spelled.append(chr(byte) if byte in printable else chr(free))
        free += byte not in printable
    return spelled
