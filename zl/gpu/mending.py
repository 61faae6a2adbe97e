"""Rows that damage may have touched: their state is made again from their tokens, and so is KV that is not finite.

What a row has is known twice: natively, and as its prompt with the tokens drawn and published since. State: the latter
tokens by position, which rows a damaged program may have written, and which constant pages are sound again.
Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from zl.gpu.guarded import GuardCounters
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import FIRST, NUMERIC, SKIPPED, RowColumns, StepSlot
from zl.shapes import PAGE, Shapes, pages_for


class Computes(Protocol):
    """What a row is computed again by."""

    def launch(self, slot: int) -> int:
        """Start the step planned in a slot."""

    def wait(self, seq: int) -> None:
        """Wait for it."""


class KVMemory:
    """A native KV pool as memory. No step may be in flight in any call."""

    def __init__(self, native: NativeStep):
        self._data, self._k_at, self._v_at = native.pool()
        self._scales = self._data.view(np.uint16)[..., : 2 * PAGE] if native.kv == "int8" else None

    def finite(self, pages: np.ndarray) -> bool:
        """Tell whether some pages, int32 [n], are finite in every layer, padding too: a NaN times zero is one still."""
        for layer in self._data if self._scales is None else self._scales:
            part = layer[pages]
            if part.dtype == np.float32:
                if not np.isfinite(part).all():
                    return False
            elif ((part & 0x7F80) == 0x7F80).any():  # bf16: the exponent of infinities and NaN
                return False
        return True

    def clear(self, page: int, offset: int) -> None:
        """Zero a page's tokens from `offset` on: nobody has written them, and they are multiplied by zero."""
        if self._scales is not None:
            self._scales[:, page, :, offset:PAGE] = 0
            self._scales[:, page, :, PAGE + offset :] = 0
            return
        for at in (self._k_at, self._v_at):
            self._data[:, page][..., at[offset:].ravel()] = 0


class Mender:
    """Mend rows over a native step's pages and state; a guard says when. All calls on the engine thread.

    slots   the last one is planned in here
    engine  everywhere, what computes now: the native step or the fallback over it
    alive   everywhere, called after each step computed here: mending takes seconds in which no step of the loop ends
    """

    def __init__(
        self,
        native: NativeStep,
        columns: RowColumns,
        slots: list[StepSlot],
        shapes: Shapes,
        counters: GuardCounters,
    ):
        self._native, self._columns, self._slots, self._shapes = native, columns, slots, shapes
        self._counters = counters
        self._own = len(slots) - 1
        self._memory = KVMemory(native)
        self._drawn = np.full((shapes.max_rows, shapes.max_model_len + 1), -1, np.int32)  # touched now
        self._suspect = np.zeros(shapes.max_rows, np.bool_)
        self._sound_pages: set[int] = set()

    def record(self, slot: int) -> None:
        """Keep the tokens drawn, by position, of a step whose results are about to be published."""
        plan = self._slots[slot]
        n = int(plan.n_segs[0])
        self._drawn[plan.seg_row[:n], plan.seg_start[:n] + plan.seg_len[:n]] = plan.out_token[:n]

    def suspect_all(self) -> None:
        """Trust nothing that rows have natively: the program is retired."""
        self._suspect.fill(True)
        self._sound_pages.clear()

    def heal(self, slot: int, engine: Computes, alive: Callable[[], None]) -> None:
        """Before a step, mend what its suspect rows would read: each row once after a retirement.

        A row that begins on constant pages has them computed again, so that it owes nothing to the damaged program. A
        row that was running has its state made again from its tokens; it keeps its KV if that is finite.
        """
        if not self._suspect.any():
            return
        plan = self._slots[slot]
        for s in range(int(plan.n_segs[0])):
            row, start, begins = _segment(plan, s)
            if not self._suspect[row]:
                continue
            self._suspect[row] = False
            if not begins:
                self._restore(row, start)
                self._mend_kv(row, start, begins, engine, alive)
            elif start:
                pages = self._columns.page_table[row, : pages_for(start)].tolist()
                if not self._sound_pages.issuperset(pages):
                    self._sound_pages.update(pages)
                    self._rebuild(row, start, begins, engine, alive)

    def lost(self, slot: int) -> np.ndarray:
        """List the segments of a step that gave no result though one was due, int [n].

        Their logits were not finite, or the row was passed over as one that has ended, which the loop never plans.
        """
        plan = self._slots[slot]
        return np.flatnonzero(plan.out_flags[: int(plan.n_segs[0])] & (NUMERIC | SKIPPED))

    def again(self, slot: int, engine: Computes, alive: Callable[[], None], *, thorough: bool) -> None:
        """Compute the segments that gave no result once more, after their rows were mended: alone, into the same slot.

        Damage that has struck a row's own pages or state ends here, unseen by anybody. What gives no result then either
        is the model's own doing.

        thorough  also compute KV again that is finite: a number may be large enough to overflow in what follows. Rows
                  are taken one after another, as long as that helps
        """
        lost = self.lost(slot).tolist()
        if not lost:
            return
        plan, n_lost = self._slots[slot], len(lost)
        for s in lost:
            row, start, begins = _segment(plan, s)
            self._mend_kv(row, start, begins, engine, alive)
        self._repeat(slot, lost, engine, alive)
        left = self.lost(slot).tolist()
        for s in left if thorough else ():
            row, start, begins = _segment(plan, s)
            if start and s in left:
                self._rebuild(row, start, begins, engine, alive)
                self._repeat(slot, left, engine, alive)
                left = self.lost(slot).tolist()
                if s in left:
                    break
        self._counters.saved_rows += n_lost - len(left)

    def _repeat(self, slot: int, segs: list[int], engine: Computes, alive: Callable[[], None]) -> None:
        """Compute some segments of a step again and put their results in its slot."""
        plan, own, n = self._slots[slot], self._slots[self._own], len(segs)
        for s in segs:
            if not plan.seg_flags[s] & FIRST:
                self._restore(int(plan.seg_row[s]), int(plan.seg_start[s]))
        own.n_segs[0] = n
        own.seg_row[:n], own.seg_flags[:n] = plan.seg_row[segs], plan.seg_flags[segs]
        own.seg_start[:n], own.seg_len[:n] = plan.seg_start[segs], plan.seg_len[segs]
        self._compute_own(engine, alive)
        plan.out_token[segs], plan.out_logprob[segs] = own.out_token[:n], own.out_logprob[:n]
        plan.out_flags[segs] = own.out_flags[:n]

    def _restore(self, row: int, start: int) -> None:
        """Bring a row's state to what it was before its step at position `start`."""
        native, n_prompt = self._native, int(self._columns.prompt_len[row])
        drawn = self._drawn[row, n_prompt : max(n_prompt, start + 1)]
        native.done[row] = 0
        if len(drawn):
            native.last_token[row] = drawn[-1]
        native.seen[row] = 0
        native.filter.add(native.seen[row], np.concatenate([native.prompt_ids[row, :n_prompt], drawn]))

    def _mend_kv(self, row: int, start: int, begins: bool, engine: Computes, alive: Callable[[], None]) -> None:
        """Compute a row's KV before position `start` again if any of it is not finite, in any layer."""
        pages = self._columns.page_table[row, : pages_for(start)]
        if start % PAGE:
            self._memory.clear(int(pages[-1]), start % PAGE)
        if start and not self._memory.finite(pages):
            self._rebuild(row, start, begins, engine, alive)

    def _rebuild(self, row: int, n_tokens: int, begins: bool, engine: Computes, alive: Callable[[], None]) -> None:
        """Compute a row's KV again up to `n_tokens`, from its prompt and the tokens drawn since.

        For that time the drawn tokens are part of the row's prompt; nobody else reads its length until the row is
        retired, which is not while its step is being launched. Of a row that begins the prompt is gathered first, and
        once more in its own first step.
        """
        columns, plan = self._columns, self._slots[self._own]
        n_prompt = int(columns.prompt_len[row])
        if n_tokens > n_prompt:
            self._native.prompt_ids[row, n_prompt:n_tokens] = self._drawn[row, n_prompt:n_tokens]
            columns.prompt_len[row] = n_tokens
        try:
            self._native.done[row] = 0
            for at in range(0, n_tokens, self._shapes.step_tokens):
                plan.n_segs[0] = 1
                plan.seg_row[0], plan.seg_start[0] = row, at
                plan.seg_flags[0] = FIRST if begins and not at else 0
                plan.seg_len[0] = min(self._shapes.step_tokens, n_tokens - at)
                self._compute_own(engine, alive)
        finally:
            columns.prompt_len[row] = n_prompt
        self._counters.rebuilt_rows += 1

    def _compute_own(self, engine: Computes, alive: Callable[[], None]) -> None:
        engine.wait(engine.launch(self._own))
        alive()


def _segment(plan: StepSlot, s: int) -> tuple[int, int, bool]:
    """Give a segment's row, the position that it starts at, and whether its row begins with it."""
    return int(plan.seg_row[s]), int(plan.seg_start[s]), bool(plan.seg_flags[s] & FIRST)
