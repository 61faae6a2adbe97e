"""A text model and its token table as bytes: a start reads them instead of deriving them from the model's files.

State: none. Refuses: asyncio, torch, zl.net.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from zl.errors import ModelError
from zl.text.detok import TokenTable
from zl.text.tokenizer import TextModel

_COUNTS = struct.Struct("<QQ")


def freeze(model: TextModel, table: TokenTable) -> tuple[dict[str, Any], bytes, bytes]:
    """Return plain JSON values, the tokenizer as the tokenizers library writes it, and the token table."""
    values = {f.name: getattr(model, f.name) for f in fields(model) if f.name != "tokenizer"}
    values["control_ids"] = sorted(model.control_ids)
    values["special"] = dict(model.special)
    ids = np.array(sorted(table.first), np.int64).tobytes()
    first = [table.first[index] for index in sorted(table.first)]
    counts = _COUNTS.pack(len(table.pieces), len(first))
    return values, model.tokenizer.to_str().encode(), counts + ids + _joined(table.pieces) + _joined(first)


def thaw(values: dict[str, Any], tokenizer: bytes, tokens: bytes) -> tuple[TextModel, TokenTable]:
    """Undo `freeze`. Raises ModelError where the bytes are not its own."""
    try:
        model = TextModel(
            tokenizer=Tokenizer.from_buffer(tokenizer), **values | {"control_ids": frozenset(values["control_ids"])}
        )
        n_pieces, n_first = _COUNTS.unpack_from(tokens)
        at = _COUNTS.size + 8 * n_first
        ids = np.frombuffer(tokens, np.int64, n_first, _COUNTS.size).tolist()
        pieces, at = _split(tokens, at, n_pieces)
        first, at = _split(tokens, at, n_first)
    except Exception as error:  # the tokenizers library raises bare Exception for every kind of damage
        raise ModelError(f"the artifact's tokenizer cannot be read ({error}); build it again") from error
    return model, TokenTable.of(pieces, dict(zip(ids, first, strict=True)), model.control_ids)


def _joined(pieces: Sequence[bytes]) -> bytes:
    return np.array([len(piece) for piece in pieces], np.uint32).tobytes() + b"".join(pieces)


def _split(data: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    ends = np.cumsum(np.frombuffer(data, np.uint32, count, at), dtype=np.int64) + at + 4 * count
    at += 4 * count
    pieces = []
    for end in ends.tolist():
        pieces.append(data[at:end])
        at = end
    return pieces, at
