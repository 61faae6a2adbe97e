"""The guard of the CUDA program: canary and patrol at step boundaries, and what happens when one of them differs.

A damaged program is retired: its graphs are dropped, the weights are uploaded again in place, and steps go on kernel by
kernel while the graphs are captured anew, one at a step boundary. It serves again when its canary and all sums are
those of the start. A fault that the driver reports ends the engine instead: it stays in the context, and nothing that
runs in this process could help. State: which of both serves, which rows may begin on KV from before. Refuses rows,
dispatch, net and asyncio.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from zl.errors import DeviceError, InvariantError
from zl.gpu.cuda_step import CudaStep
from zl.gpu.device_patrol import DevicePatrol
from zl.gpu.guarded import Guarded
from zl.gpu.heartbeat import Canary, Heartbeat
from zl.gpu.native.packed import Packed
from zl.gpu.pinned import FIRST, NUMERIC, RowColumns, StepSlot
from zl.gpu.programs import Engine, Tensors
from zl.gpu.weights import WeightSource
from zl.shapes import ModelShape, Shapes, pages_for

log = logging.getLogger("zl")

RETRY_S = 5.0
"""Time between two checks for the sake of one bad row."""


class CudaGuard(Guarded):
    """Guard a CudaStep that was opened with `canary`. Steps may run ahead; all calls on the engine thread.

    shapes   as heartbeat.with_canary gave them: the last row and page are the canary's
    slots    the last one is the guard's own: the loop must not plan in it
    tensors  the model's tensors by canonical name, read again when the program is damaged
    beat_s   time between two heartbeats; 0 turns them off, but for the check that a bad row asks for
    Raises   DeviceError: the program does not repeat itself
    """

    def __init__(
        self,
        step: CudaStep,
        columns: RowColumns,
        slots: list[StepSlot],
        shapes: Shapes,
        tensors: Mapping[str, torch.Tensor],
        *,
        beat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(clock)
        self.name = step.name
        self._step = step
        self._columns, self._slots, self._shapes = columns, slots, shapes
        self._own = len(slots) - 1
        self._tensors = tensors
        self._beating = beat_s > 0
        self._newest = [0] * len(slots)  # by slot, the step launched last
        self._doubtful = False  # a row was not finite, and no check has followed yet
        self._checked_at = -RETRY_S
        self._suspect = np.zeros(shapes.max_rows, np.bool_)
        self._sound_pages: set[int] = set()
        canary = Canary(self, columns, slots, self._own, shapes)
        self.heartbeat = Heartbeat(canary, DevicePatrol(step.weights(), step.stream, beat_s), beat_s, clock())

    # What the canary runs on is the guard itself: captured or not, it is the program that serves.

    @property
    def shape(self) -> ModelShape:
        """Give the model's sizes."""
        return self._step.shape

    def first_logits(self, out: np.ndarray) -> bool:
        """Copy the last step's first logits, as CudaStep does."""
        return self._step.first_logits(out)

    @property
    def serving(self) -> str:
        """Name what computes steps now."""
        return f"{self.name}, uncaptured" if self.fallback else self.name

    @property
    def memory(self) -> dict[str, int]:
        """Count what the program holds on the device, bytes by component."""
        return self._step.memory

    def launch(self, slot: int) -> int:
        """Start a step: one graph, or kernel by kernel while there are no graphs."""
        if slot != self._own and self._suspect.any():
            self._heal(slot)
        if self.fallback:
            self._newest[slot] = self._step.launch_uncaptured(slot)
        else:
            self._newest[slot] = self._step.launch(slot)
        return self._newest[slot]

    def wait(self, seq: int) -> None:
        """Wait for a step; a row that is not finite has the program checked at the next boundary, or RETRY_S later."""
        self._step.wait(seq)
        self.progress_at = self._clock()
        if self._doubtful:
            return
        for slot, newest in zip(self._slots[:-1], self._newest, strict=False):
            if newest == seq:
                self._doubtful = bool((slot.out_flags[: int(slot.n_segs[0])] & NUMERIC).any())

    def close(self) -> None:
        """Close the program."""
        self._step.close()

    def due(self) -> bool:
        """Tell whether a beat, a slice, a capture or a check is waiting."""
        return self._must_check(self._clock()) or self.fallback or (self._beating and super().due())

    def between(self) -> float | None:
        """Do what is due: at most a canary's step and a slice, or one capture, or a whole check."""
        now = self.progress_at = self._clock()
        if self.fallback:
            self._recapture(now)
            return 0.0 if self.fallback else self.heartbeat.pause(now)
        if self._must_check(now):
            self._doubtful, self._checked_at = False, now
            wrong: str | None = self.heartbeat.verify(now)
            if not wrong:
                self._suspect_constant_pages()  # something else made the logits so, and these go to others
        else:
            wrong = self.heartbeat.tend(now)
        if wrong:
            self.counters.beats_failed += 1
            self._retire(wrong)
            return 0.0
        if wrong is not None:
            self.counters.beats += 1
        return self.heartbeat.pause(now)

    def _must_check(self, now: float) -> bool:
        """Tell whether a row was not finite and has not had its check; the last such check is RETRY_S ago at least."""
        return self._doubtful and now >= self._checked_at + RETRY_S

    def _suspect_constant_pages(self) -> None:
        self._suspect[:-1] = True
        self._sound_pages.clear()

    def _retire(self, why: str) -> None:
        """Drop the graphs, upload the weights again and check them; from then on steps run uncaptured."""
        log.error("program retired: %s; uploading the weights again", why)
        self.counters.retired += 1
        self._suspect_constant_pages()
        self._on_retire()
        begun = self._clock()
        self._step.drop_programs()
        self.fallback = True
        self._step.reload(self._tensors, self._alive)
        still = self.heartbeat.verify(self._clock())
        if still:
            raise DeviceError(
                f"{why}; with the weights uploaded again, {still}: this device does not compute what it computed at "
                "the start; look at its error counters (nvidia-smi -q) before serving from it again",
                call="heartbeat",
            )
        log.warning("fallback: %s, after %.1f s; capturing again", self.serving, self._clock() - begun)

    def _recapture(self, now: float) -> None:
        """Capture one program; with the last one, let the graphs serve if they pass."""
        if not self._step.recapture_one():
            return
        self.fallback = False
        wrong = self.heartbeat.verify(now)
        if not wrong:
            self.counters.recaptured += 1
            log.warning("program recaptured: weights and canary equal those at start")
            return
        self.counters.recaptures_failed += 1
        log.error("recapture failed: %s", wrong)
        self._retire(wrong)

    def _alive(self, _n_bytes: int) -> None:
        self.progress_at = self._clock()

    def _heal(self, slot: int) -> None:
        """Before a step, compute the constant pages again that its rows would begin on, where these are suspect.

        A row that was running keeps its KV. The program's own slot is waited for, steps that run ahead are not.
        """
        plan = self._slots[slot]
        n = int(plan.n_segs[0])
        begins = (plan.seg_flags[:n] & FIRST).astype(np.bool_) & self._suspect[plan.seg_row[:n]]
        for s in np.flatnonzero(begins):
            row, start = int(plan.seg_row[s]), int(plan.seg_start[s])
            self._suspect[row] = False
            pages = set(self._columns.page_table[row, : pages_for(start)].tolist())
            if not start or self._sound_pages >= pages:
                continue
            self._sound_pages |= pages
            self._rebuild(row, start)

    def _rebuild(self, row: int, n_tokens: int) -> None:
        """Compute the KV of a row's first `n_tokens` tokens, all of its prompt, before the row begins."""
        if n_tokens > int(self._columns.prompt_len[row]):
            raise InvariantError(f"row {row} begins at token {n_tokens} of {int(self._columns.prompt_len[row])}")
        plan = self._slots[self._own]
        for at in range(0, n_tokens, self._shapes.step_tokens):
            plan.n_segs[0] = 1
            plan.seg_row[0], plan.seg_start[0] = row, at
            plan.seg_len[0] = min(self._shapes.step_tokens, n_tokens - at)
            plan.seg_flags[0] = 0 if at else FIRST  # the row's own first segment starts it once more, all the same
            self._step.wait(self._step.launch_uncaptured(self._own))
            self.progress_at = self._clock()
        self.counters.rebuilt_rows += 1


def open_cuda_guard(
    engine: Engine,
    weights: WeightSource | Packed,
    columns: RowColumns,
    slots: list[StepSlot],
    shapes: Shapes,
    beat_s: float,
) -> CudaGuard:
    """Guard what `open_engine` gave for a GPU. weights: what it was opened with; the rest are CudaGuard's."""
    if not isinstance(engine, CudaStep) or isinstance(weights, Packed):
        raise InvariantError(f"{type(engine).__name__} over {type(weights).__name__} is no captured program of a model")
    tensors = Tensors(weights, "bfloat16")
    return CudaGuard(engine, columns, slots, shapes, tensors, beat_s=beat_s)
