"""The guard: an engine that runs the native program, retires it when it is damaged, and brings it back.

While the program is retired, steps run in gpu.fallback over the same KV pool, and a thread packs the weights again in
place; the heartbeat must pass before the program serves again. State: which of both computes, the tokens of every row
since it began, and which rows' KV a damaged program may have written. Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from zl.errors import InvariantError
from zl.gpu.guarded import Guarded, words
from zl.gpu.heartbeat import Canary, Heartbeat, Patrol
from zl.gpu.native.packed import Packed
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import FIRST, NUMERIC, RowColumns, StepSlot
from zl.gpu.renewal import FromPacked, FromSource, Renewal
from zl.shapes import Shapes, pages_for

if TYPE_CHECKING:  # torch is loaded when a program is retired, and not before
    from zl.gpu.fallback import EagerStep, NativePool
    from zl.gpu.model import Weights
    from zl.gpu.weights import WeightSource

log = logging.getLogger("zl")

POLL_S = 0.02
"""How often an idle loop looks whether the recapture has ended."""

RETRY_S = 5.0
"""Time between two recaptures where the first did not help, and between two checks for the sake of one bad row."""


class Guard(Guarded):
    """Guard a NativeStep. One step in flight at most; all calls on the engine thread.

    shapes   as heartbeat.with_canary gave them: the last row and page are the canary's
    slots    the last one is the guard's own: the loop must not plan in it
    renewal  where weights come from again; closed with the guard
    beat_s   time between two heartbeats; 0 turns them off: a step that fails is still caught
    """

    def __init__(
        self,
        native: NativeStep,
        columns: RowColumns,
        slots: list[StepSlot],
        shapes: Shapes,
        renewal: Renewal,
        *,
        beat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(clock)
        self.name = native.name
        self._native = native
        self._columns, self._slots, self._shapes = columns, slots, shapes
        self._own = len(slots) - 1
        self._renewal = renewal
        self._pool: NativePool | None = None  # made with the first fallback
        canary = Canary(native, columns, slots, self._own, shapes)
        self.heartbeat = Heartbeat(canary, Patrol(native.packed(), beat_s), beat_s, clock())
        self._fallback: EagerStep | None = None
        self._weights: Weights | None = None
        self._thread: threading.Thread | None = None
        self._packed_well = False
        self._recapture_at = 0.0
        self._checked_at = -RETRY_S
        # Rows: the state before the step in flight, every token drawn by position, doubts about KV written before.
        self._last_before = native.last_token.copy()
        self._done_before = native.done.copy()
        self._drawn = np.full((shapes.max_rows, shapes.max_model_len + 1), -1, np.int32)  # touched now
        self._suspect = np.zeros(shapes.max_rows, np.bool_)
        self._sound_pages: set[int] = set()
        self._seq = 0
        self._slot = 0
        self._flight: int | None = None

    @property
    def serving(self) -> str:
        """Name what computes steps now."""
        return self.name if self._fallback is None else self._fallback.name

    def inner_ns(self) -> tuple[int, int]:
        """Tell what the newest step spent on its context and on sampling; the fallback keeps no such times."""
        return self._native.inner_ns() if self._fallback is None else (0, 0)

    @property
    def memory(self) -> dict[str, int]:
        """Count what the program holds, bytes by component."""
        return self._native.memory

    def launch(self, slot: int) -> int:
        """Start a step; where the program fails to, compute it in the fallback."""
        if self._flight is not None or slot == self._own:
            raise InvariantError(f"guard: launch of slot {slot} with step {self._flight} in flight")
        self._seq += 1
        self._slot = slot
        np.copyto(self._last_before, self._native.last_token)
        np.copyto(self._done_before, self._native.done)
        try:
            self._heal(slot)
            if self._fallback is None:
                self._flight = self._native.launch(slot)
        except Exception as failure:  # whatever it was: the fallback tells a broken program from a broken plan
            if self._fallback is not None:
                raise
            self._retire(words(failure))
            self._rewind(slot)
        if self._fallback is not None:
            self._compute(slot)
        return self._seq

    def wait(self, seq: int) -> None:
        """Wait for step `seq`; where it failed, or a row is not finite and the program is damaged, compute it again."""
        if seq != self._seq:
            raise InvariantError(f"step {seq} was waited for, {self._seq} was launched last")
        flight, self._flight = self._flight, None
        if flight is not None:
            try:
                self._native.wait(flight)
                wrong = self._doubt(self._slots[self._slot])
            except Exception as failure:
                wrong = words(failure)
            if wrong:
                self._retire(wrong)
                self._rewind(self._slot)
                self._compute(self._slot)
        self._record(self._slots[self._slot])
        self.progress_at = self._clock()

    def close(self) -> None:
        """End the recapture and the native step. Idempotent."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._fallback = None
        self._pool = None
        self._native.close()
        self._renewal.close()

    def between(self) -> float | None:
        """Do what is due at a step boundary; return the seconds an idle loop may sleep, None for ever."""
        now = self.progress_at = self._clock()
        if self._fallback is not None:
            self._recapture(now)
            if self._fallback is not None:
                return POLL_S
        try:
            wrong = self.heartbeat.tend(now)
        except Exception as failure:
            wrong = words(failure)
        if wrong:
            self.counters.beats_failed += 1
            self._retire(wrong)
            return POLL_S
        if wrong is not None:
            self.counters.beats += 1
        return self.heartbeat.pause(now)

    # -- retirement and return -----------------------------------------------------------------------------------------

    def _doubt(self, slot: StepSlot) -> str:
        """Check the program at once where a row's logits were not finite: that fails a request, so be sure.

        Returns what is wrong with the program, or "".
        """
        now = self._clock()
        if not (slot.out_flags[: int(slot.n_segs[0])] & NUMERIC).any() or now < self._checked_at + RETRY_S:
            return ""
        self._checked_at = now
        wrong = self.heartbeat.verify(now)
        if wrong:
            self.counters.beats_failed += 1
        else:
            self.counters.beats += 1
        return wrong

    def _retire(self, why: str) -> None:
        """Put the fallback in the program's place and start the recapture."""
        log.error("program retired: %s; steps run in plain torch while it is packed again", why)
        self.counters.retired += 1
        self._flight = None
        self._native.settle()  # sync
        self._suspect.fill(True)
        self._sound_pages.clear()
        self._on_retire()
        begun = self._clock()
        self._fallback = self._apart(self._open_fallback)
        self.fallback = True
        log.warning("fallback: %s, loaded in %.1f s", self._fallback.name, self._clock() - begun)
        self._start_packing()

    def _open_fallback(self) -> EagerStep:
        from zl.gpu.fallback import EagerStep, open_pool

        self._pool = self._pool or open_pool(self._native)
        self._weights = weights = self._renewal.load(self._native, lambda _: None)
        size = sum(t.numel() for t in weights.tensors.values()) * 4
        return EagerStep(
            self._native, weights, self._columns, self._slots, self._shapes, pool=self._pool, widen=size < 4 << 30
        )

    def _apart(self, work: Callable[[], EagerStep]) -> EagerStep:
        """Wait for work that takes seconds, on a thread of its own, so that the time of progress goes on."""
        done: list[EagerStep] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                done.append(work())
            except BaseException as failure:
                failed.append(failure)

        thread = threading.Thread(target=run, name="zl-fallback")
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            self.progress_at = self._clock()
        if failed:
            raise failed[0]
        return done[0]

    def _start_packing(self) -> None:
        self._packed_well = False
        self._thread = threading.Thread(target=self._pack, name="zl-recapture", daemon=True)
        self._thread.start()

    def _pack(self) -> None:
        assert self._weights is not None
        try:
            self._renewal.pack(self._native, self._weights)
            self._packed_well = True
        except Exception as failure:
            log.error("recapture: %s", words(failure))

    def _recapture(self, now: float) -> None:
        """Let the program serve again if it has been packed and passes; try again later if it does not."""
        if self._thread is None:
            if now >= self._recapture_at:
                self._start_packing()
            return
        if self._thread.is_alive():
            return
        self._thread.join()
        self._thread = None
        try:
            wrong = self.heartbeat.verify(now) if self._packed_well else "it could not be packed"
        except Exception as failure:
            wrong = words(failure)
        if wrong:
            self._native.settle()  # sync
            self.counters.recaptures_failed += 1
            self._recapture_at = now + RETRY_S
            log.error("recapture failed: %s; steps stay in plain torch, next try in %.0f s", wrong, RETRY_S)
            return
        self.counters.recaptured += 1
        self._fallback = self._weights = None
        self.fallback = False
        log.warning("program recaptured: weights and canary equal those at start")

    # -- steps in the fallback, and rows that a damaged program touched ------------------------------------------------

    def _compute(self, slot: int) -> None:
        assert self._fallback is not None
        self._heal(slot)
        self._fallback.wait(self._fallback.launch(slot))

    def _rewind(self, slot: int) -> None:
        """Bring the row state back to before a step that may have gone any part of its way."""
        assert self._fallback is not None
        np.copyto(self._native.last_token, self._last_before)
        np.copyto(self._native.done, self._done_before)
        plan, columns = self._slots[slot], self._columns
        for row, start in zip(plan.seg_row[: plan.n_segs[0]].tolist(), plan.seg_start.tolist(), strict=False):
            n_prompt = int(columns.prompt_len[row])
            drawn = self._drawn[row, n_prompt : max(n_prompt, start + 1)]
            self._fallback.see_only(row, np.concatenate([self._native.prompt_ids[row, :n_prompt], drawn]))

    def _record(self, slot: StepSlot) -> None:
        """Keep the tokens drawn, by position: what a rebuilt row is computed from."""
        n = int(slot.n_segs[0])
        self._drawn[slot.seg_row[:n], slot.seg_start[:n] + slot.seg_len[:n]] = slot.out_token[:n]

    def _heal(self, slot: int) -> None:
        """Before a step, mend the KV that its suspect rows would read: each row once after a retirement.

        A row that begins on constant pages has them computed again, so that it owes nothing to the damaged program. A
        row that was running keeps its KV if that is finite, and is computed again from its tokens if it is not.
        """
        if not self._suspect.any():
            return
        plan = self._slots[slot]
        for s in range(int(plan.n_segs[0])):
            row, start, begins = int(plan.seg_row[s]), int(plan.seg_start[s]), bool(plan.seg_flags[s] & FIRST)
            if not self._suspect[row]:
                continue
            self._suspect[row] = False
            if not start or (self._native.done[row] and not begins):
                continue
            pages = self._columns.page_table[row, : pages_for(start)]
            if begins:
                if self._sound_pages.issuperset(pages.tolist()):
                    continue
                self._sound_pages.update(pages.tolist())
            elif self._finite(pages, start):
                continue
            self._rebuild(row, start, begins)

    def _finite(self, pages: np.ndarray, n_tokens: int) -> bool:
        """Tell whether the last layer's KV is finite: what is not finite in a layer is not in those after it."""
        import torch

        assert self._pool is not None
        k, v = self._pool.read(-1, torch.from_numpy(pages.astype(np.int64)))
        return bool(torch.isfinite(k[:n_tokens]).all() and torch.isfinite(v[:n_tokens]).all())

    def _rebuild(self, row: int, n_tokens: int, begins: bool) -> None:
        """Compute a row's KV again up to `n_tokens`, from its prompt and the tokens drawn since.

        For that time the drawn tokens are part of the row's prompt; nobody else reads its length until the row is
        retired, which is not while its step is being launched. Of a row that begins the prompt is gathered first, and
        once more in its own first step.
        """
        columns, plan = self._columns, self._slots[self._own]
        n_prompt, done = int(columns.prompt_len[row]), int(self._native.done[row])
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
                engine = self._native if self._fallback is None else self._fallback
                engine.wait(engine.launch(self._own))
                self.progress_at = self._clock()
        finally:
            columns.prompt_len[row] = n_prompt
            self._native.done[row] = done
        self.counters.rebuilt_rows += 1


def open_guard(
    native: NativeStep,
    weights: WeightSource | Packed,
    columns: RowColumns,
    slots: list[StepSlot],
    shapes: Shapes,
    beat_s: float,
) -> Guard:
    """Guard a native step. weights: what it was opened with; the other arguments are Guard's."""
    renewal = FromPacked(weights.weights) if isinstance(weights, Packed) else FromSource(weights)
    return Guard(native, columns, slots, shapes, renewal, beat_s=beat_s)
