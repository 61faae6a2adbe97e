"""Columns: the fixed host buffers that the event loop, the engine and the programs share.

State: the arrays themselves, each with exactly one writing thread (named below). Allocated once, before READY.
Refuses asyncio, net and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from zl.flags import EOS, FIRST, IGNORE_EOS, LENGTH, LOGPROBS, NUMERIC, SAMPLE, SKIPPED
from zl.shapes import MAX_PIECES, OWN, TOKEN_BYTES, Shapes

__all__ = [
    "EOS", "FIRST", "IGNORE_EOS", "LENGTH", "LOGPROBS", "NUMERIC", "SAMPLE", "SKIPPED", "Allocate", "RowColumns",
    "StepSlot", "columns_bytes", "plain_allocate", "slots_bytes",
]  # fmt: skip

Allocate = Callable[[tuple[int, ...], type], np.ndarray]


def plain_allocate(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Allocate an ordinary zeroed array: the CPU device's kind of pinned memory."""
    return np.zeros(shape, dtype)


class RowColumns:
    """What a row's steps read; written by the event-loop thread before the row is seated, constant during its life.

    A prompt is given in pieces, in order and without a gap; the program gathers them in the row's first step, and looks
    at none of them afterwards.

    own_ids      int32 [max_rows, max_model_len], ids that the host has written: of text, and the template's
    n_pieces     int32 [max_rows]
    piece_at     int32 [max_rows, max_pieces], position in the prompt of each piece's first token
    piece_source int64 [max_rows, max_pieces], where its ids lie: the byte in `arena` that an unaligned run of
                 little-endian int32 begins at; below 0, ~index in the row's own_ids
    arena        uint8 [n], the berths that requests arrive in; not allocated here
    prompt_len   int32 [max_rows], tokens
    max_new      int32 [max_rows], most tokens the answer may have
    page_table   int32 [max_rows, pages_per_row]; -1 where unused
    temperature, top_p, penalty   float32 [max_rows]
    seed         uint64 [max_rows]
    row_flags    uint8 [max_rows]: IGNORE_EOS, LOGPROBS
    """

    def __init__(self, shapes: Shapes, allocate: Allocate = plain_allocate, arena: np.ndarray | None = None):
        n = shapes.max_rows
        self.own_ids = allocate((n, shapes.max_model_len), np.int32)
        self.n_pieces = allocate((n,), np.int32)
        self.piece_at = allocate((n, MAX_PIECES), np.int32)
        self.piece_source = allocate((n, MAX_PIECES), np.int64)
        # One word where there are no berths: a kernel takes no pointer to nothing.
        self.arena = allocate((TOKEN_BYTES,), np.uint8) if arena is None else arena
        self.prompt_len = allocate((n,), np.int32)
        self.max_new = allocate((n,), np.int32)
        self.page_table = allocate((n, shapes.pages_per_row), np.int32)
        self.page_table.fill(-1)
        self.temperature = allocate((n,), np.float32)
        self.top_p = allocate((n,), np.float32)
        self.penalty = allocate((n,), np.float32)
        self.seed = allocate((n,), np.uint64)
        self.row_flags = allocate((n,), np.uint8)

    def put_prompt(self, row: int, own: np.ndarray, pieces: Sequence[tuple[int, int]]) -> None:
        """Write a row's prompt: its own ids, int32 [n], and (source, tokens) of each piece, at most MAX_PIECES."""
        self.own_ids[row, : len(own)] = own
        self.n_pieces[row] = len(pieces)
        at = 0
        for i, (source, n) in enumerate(pieces):
            self.piece_at[row, i], self.piece_source[row, i] = at, source
            at += n
        self.prompt_len[row] = at

    def put_ids(self, row: int, ids: np.ndarray | Sequence[int]) -> None:
        """Write a row's prompt as ids of its own, int32 [n]."""
        self.put_prompt(row, np.asarray(ids, np.int32), [(OWN, len(ids))])

    def gather(self, row: int, out: np.ndarray) -> None:
        """Read a row's prompt, piece by piece, into the front of `out`, int32 [max_model_len]."""
        end = int(self.prompt_len[row])
        for i in reversed(range(int(self.n_pieces[row]))):
            at, source = int(self.piece_at[row, i]), int(self.piece_source[row, i])
            if source < 0:
                out[at:end] = self.own_ids[row, ~source : ~source + end - at]
            else:
                out[at:end] = self.arena[source : source + TOKEN_BYTES * (end - at)].view("<i4")
            end = at


class StepSlot:
    """One step's plan and results. The engine thread writes the plan while no step in flight reads the slot.

    n_segs       int32 [1], segments in this step, at most one a row
    seg_row      int32 [max_rows]
    seg_start    int32 [max_rows], position of the first token computed
    seg_len      int32 [max_rows], tokens
    seg_flags    uint8 [max_rows]: SAMPLE (the last position yields a token), FIRST (the row's first segment)
    out_token    int32 [max_rows], written by the program, as are
    out_logprob  float32 [max_rows]
    out_flags    uint8 [max_rows]: EOS, LENGTH, NUMERIC, SKIPPED
    """

    def __init__(self, shapes: Shapes, allocate: Allocate = plain_allocate):
        n = shapes.max_rows
        self.n_segs = allocate((1,), np.int32)
        self.seg_row = allocate((n,), np.int32)
        self.seg_start = allocate((n,), np.int32)
        self.seg_len = allocate((n,), np.int32)
        self.seg_flags = allocate((n,), np.uint8)
        self.out_token = allocate((n,), np.int32)
        self.out_logprob = allocate((n,), np.float32)
        self.out_flags = allocate((n,), np.uint8)


def columns_bytes(shapes: Shapes) -> int:
    """Count the bytes of RowColumns, without the arena's."""
    return shapes.max_rows * (4 * shapes.max_model_len + 4 * shapes.pages_per_row + 12 * MAX_PIECES + 33) + 4


def slots_bytes(shapes: Shapes, n_slots: int) -> int:
    """Count the bytes of `n_slots` StepSlots."""
    return n_slots * (4 + 22 * shapes.max_rows)
