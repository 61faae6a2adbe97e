"""The step program in plain torch: plan columns in, tokens out, synchronously. The twin of the fast ones.

Owns the state of every row: last token, done flag, filter of the tokens seen. Refuses rows, dispatch, net, asyncio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from zl.errors import InvariantError
from zl.gpu.model import Layout, Weights, forward, logits, make_rope
from zl.gpu.pinned import EOS, FIRST, IGNORE_EOS, LENGTH, NUMERIC, SAMPLE, SKIPPED, RowColumns, StepSlot
from zl.gpu.pool import KVPool
from zl.sampling.filter import Filter
from zl.shapes import ModelShape, Shapes, pages_for


class Sample(Protocol):
    """Draw one token per row: the signature of `zl.sampling.sampler.sample`.

    logits f32 [n, vocab]; seen bool [n, vocab]; temperature, top_p, penalty f32 [n]; seed: Python integers;
    index i64 [n] → token i64 [n], logprob f32 [n], finite bool [n]
    """

    def __call__(
        self,
        logits: torch.Tensor,
        seen: torch.Tensor,
        temperature: torch.Tensor,
        top_p: torch.Tensor,
        penalty: torch.Tensor,
        seed: Sequence[int],
        index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class TorchStep:
    """Runs steps over the shared columns. `launch` computes at once, so `wait` has nothing to wait for.

    weights  as loaded; widened here, so that bf16 costs no conversion a step
    slots    the step slots that `launch` names by index
    shapes   n_pages sizes the pool, made here in the weights' dtype
    sample   the sampler; None takes zl's own
    pool     where keys and values live; None makes one
    widen    keep float32 copies of bf16 weights: twice the memory, no conversion a step
    penalty_filter  a kind of zl.sampling.filter
    """

    name = "torch, eager"
    fallback = True

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        columns: RowColumns,
        slots: Sequence[StepSlot],
        shapes: Shapes,
        *,
        device: str = "cpu",
        sample: Sample | None = None,
        pool: KVPool | None = None,
        widen: bool = True,
        penalty_filter: str = "exact",
    ):
        self._filter = Filter(penalty_filter, shape.vocab)
        self.name += self._filter.note
        self._device = torch.device(device)
        self._weights = (weights.widened() if widen else weights).to(self._device)
        self._pool = KVPool(shape, shapes.n_pages, weights.dtype, self._device) if pool is None else pool
        self._columns = columns
        self._slots = slots
        self._sample: Sample = _own_sampler() if sample is None else sample
        n_rows, n_positions = columns.own_ids.shape
        self._rope = make_rope(shape, n_positions, self._device)
        self._eos = frozenset(shape.eos_ids)
        self._open_rows(n_rows, n_positions)
        self._launched = 0

    def launch(self, slot: int) -> int:
        """Compute the step that slot `slot` plans and write its results there; return its sequence number."""
        self._run(self._slots[slot])
        self._launched += 1
        return self._launched

    def wait(self, seq: int) -> None:
        """Return: every launched step has ended. Raises InvariantError for a number that was never given out."""
        if not 0 < seq <= self._launched:
            raise InvariantError(f"step {seq} was waited for, {self._launched} were launched")

    def close(self) -> None:
        """Do nothing: the tensors go with the object, and no thread is held."""

    # -- the rows' state: a method, so that another step can keep it elsewhere ----------------------------------------

    def _open_rows(self, n_rows: int, n_positions: int) -> None:
        self._last_token: np.ndarray = np.zeros(n_rows, np.int64)
        self._done: np.ndarray = np.zeros(n_rows, np.uint8)
        self._seen: np.ndarray = np.zeros((n_rows, self._filter.words), np.uint32)
        self._prompt_ids: np.ndarray = np.zeros((n_rows, n_positions), np.int32)

    def see_only(self, row: int, ids: np.ndarray) -> None:
        """Clear a row's filter and add these ids, int32 [n]."""
        self._seen[row] = 0
        self._filter.add(self._seen[row], ids)

    def _seen_of(self, rows: np.ndarray) -> torch.Tensor:
        """Gather the tokens that the rows' filters take for seen, bool [n, vocab]."""
        words = self._filter.bitmaps(self._seen[rows])
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._filter.vocab, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_)).to(self._device)

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, slot: StepSlot) -> None:
        live = self._begin(slot)
        if not live:
            return
        rows = slot.seg_row[live]
        starts, lengths = slot.seg_start[live].tolist(), slot.seg_len[live].tolist()
        layout = Layout(starts, lengths, self._page_table(rows, starts, lengths))
        ids = [self._token_ids(*segment) for segment in zip(rows.tolist(), starts, lengths, strict=True)]
        token_ids = torch.from_numpy(np.concatenate(ids)).to(self._device)
        hidden = forward(self._weights, self._rope, token_ids, layout, self._pool)
        ends = np.cumsum(lengths) - 1
        drawing = np.flatnonzero(slot.seg_flags[live] & SAMPLE)
        if len(drawing):
            self._draw(slot, np.asarray(live)[drawing], hidden[torch.from_numpy(ends[drawing]).to(self._device)])

    def _begin(self, slot: StepSlot) -> list[int]:
        """Reset the outputs and first-segment rows; return the segments to compute."""
        n_segs = int(slot.n_segs[0])
        slot.out_token[:n_segs] = -1
        slot.out_logprob[:n_segs] = 0
        slot.out_flags[:n_segs] = 0
        live = []
        for s in range(n_segs):
            row = int(slot.seg_row[s])
            if slot.seg_flags[s] & FIRST:
                self._done[row] = False
                self._columns.gather(row, self._prompt_ids[row])
                self.see_only(row, self._prompt_ids[row, : self._columns.prompt_len[row]])
            if self._done[row]:
                slot.out_flags[s] = SKIPPED
            else:
                live.append(s)
        return live

    def _page_table(self, rows: np.ndarray, starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Take the segments' page tables, i64 [n_segs, n], and zero the pages whose first token is in this step."""
        widest = max(pages_for(start + length) for start, length in zip(starts, lengths, strict=True))
        table = self._columns.page_table[rows, :widest].astype(np.int64)
        fresh = []
        for row, pages, start, length in zip(rows, table, starts, lengths, strict=True):
            used = pages[: pages_for(start + length)]
            if length < 1 or used.min() < 0 or used.max() >= self._pool.n_pages:
                raise InvariantError(f"row {row}: positions {start} to {start + length} have pages {used.tolist()}")
            fresh.append(used[pages_for(start) :])
        device_table = torch.from_numpy(table).to(self._device)
        self._pool.zero(torch.from_numpy(np.concatenate(fresh)).to(self._device))
        return device_table

    def _token_ids(self, row: int, start: int, length: int) -> np.ndarray:
        """Pick a segment's tokens, i64 [length]: from the prompt, then the row's last token."""
        ids = np.full(length, self._last_token[row], np.int64)
        prompt = self._prompt_ids[row, start : min(start + length, int(self._columns.prompt_len[row]))]
        ids[: len(prompt)] = prompt
        return ids

    def _draw(self, slot: StepSlot, segs: np.ndarray, hidden: torch.Tensor) -> None:
        """Sample for the segments `segs` from their last hidden states, and write results and row state."""
        columns, rows = self._columns, slot.seg_row[segs]
        index = slot.seg_start[segs].astype(np.int64) + slot.seg_len[segs] - columns.prompt_len[rows]

        def column(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values[rows]).to(self._device)

        token, logprob, finite = self._sample(
            logits(self._weights, hidden),
            self._seen_of(rows),
            column(columns.temperature),
            column(columns.top_p),
            column(columns.penalty),
            [int(seed) for seed in columns.seed[rows]],
            torch.from_numpy(index).to(self._device),
        )
        tokens, logprobs, healthy = token.tolist(), logprob.tolist(), finite.tolist()  # sync
        for s, row, i, drawn, lp, ok in zip(segs, rows, index, tokens, logprobs, healthy, strict=True):
            if not ok:
                slot.out_flags[s] = NUMERIC
                self._done[row] = True
                continue
            slot.out_token[s], slot.out_logprob[s] = drawn, lp
            self._last_token[row] = drawn
            self._filter.add(self._seen[row], np.array([drawn]))
            flags = 0
            if drawn in self._eos and not columns.row_flags[row] & IGNORE_EOS:
                flags |= EOS
            if i + 1 >= columns.max_new[row]:
                flags |= LENGTH
            slot.out_flags[s] = flags
            self._done[row] = flags != 0


def _own_sampler() -> Sample:
    from zl.sampling.sampler import sample  # here, for it brings Triton, which a given sampler does not need

    return sample
