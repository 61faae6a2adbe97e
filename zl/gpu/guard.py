"""The guard: an engine that runs the native program, retires it when it is damaged, and brings it back.

While the program is retired, steps run in gpu.fallback over the same KV pool, and a thread packs the weights again in
place; the heartbeat must pass before the program serves again. State: which of both computes. What becomes of the
rows is mending.py's. Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from zl.errors import InvariantError
from zl.gpu.guarded import Guarded, words
from zl.gpu.heartbeat import Canary, Heartbeat, Patrol
from zl.gpu.mending import Computes, Mender
from zl.gpu.native.packed import Packed
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.renewal import FromPacked, FromSource, Renewal
from zl.shapes import Shapes

if TYPE_CHECKING:  # torch is loaded when a program is retired, and not before
    from zl.gpu.fallback import EagerStep, NativePool
    from zl.gpu.model import Weights
    from zl.gpu.weights import WeightSource

log = logging.getLogger("zl")

POLL_S = 0.02
"""How often an idle loop looks whether the recapture has ended."""

RETRY_S = 5.0
"""Time between two recaptures where the first did not help, and between two sweeps in vain for one bad row."""


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
        self._vain_at = -RETRY_S  # the newest check for a row that stayed what it was: not finite
        self._mender = Mender(native, columns, slots, shapes, self.counters)
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
        try:
            self._mender.heal(slot, self._engine, self._alive)
            if self._fallback is None:
                self._flight = self._native.launch(slot)
        except Exception as failure:  # whatever it was: the fallback tells a broken program from a broken plan
            if self._fallback is not None:
                raise
            self._retire(words(failure))
        if self._fallback is not None:
            self._compute(slot)
        return self._seq

    def wait(self, seq: int) -> None:
        """Wait for step `seq`; compute it again where the program is damaged, else its rows that gave no result."""
        if seq != self._seq:
            raise InvariantError(f"step {seq} was waited for, {self._seq} was launched last")
        flight, self._flight = self._flight, None
        if flight is not None:
            try:
                self._native.wait(flight)
                wrong = self._doubt(self._slot)
            except Exception as failure:
                wrong = words(failure)
            if wrong:
                self._retire(wrong)
                self._compute(self._slot)
        self._mender.record(self._slot)
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

    def _doubt(self, slot: int) -> str:
        """Check the program at once where a row gave no result: that would fail a request. Sound, it computes it again.

        The canary runs each time. Sweeping the weights and computing finite KV again is left out for RETRY_S after it
        was in vain: prompts that drive the model out of its range may come in every second.
        Returns what is wrong with the program, or "".
        """
        if not len(self._mender.lost(slot)):
            return ""
        now = self._clock()
        wrong = self.heartbeat.verify(now, sweep=now >= self._vain_at + RETRY_S)
        if wrong:
            self.counters.beats_failed += 1
            return wrong
        self.counters.beats += 1
        self._again(slot)
        return ""

    def _again(self, slot: int) -> None:
        """Compute the rows that gave no result again; note where that was in vain."""
        thorough = self._clock() >= self._vain_at + RETRY_S
        self._mender.again(slot, self._engine, self._alive, thorough=thorough)
        if len(self._mender.lost(slot)):
            self._vain_at = self._clock()

    def _retire(self, why: str) -> None:
        """Put the fallback in the program's place and start the recapture."""
        log.error("program retired: %s; steps run in plain torch while it is packed again", why)
        self.counters.retired += 1
        self._flight = None
        self._native.settle()  # sync
        self._mender.suspect_all()
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

    # -- steps in the fallback -----------------------------------------------------------------------------------------

    def _compute(self, slot: int) -> None:
        assert self._fallback is not None
        self._mender.heal(slot, self._fallback, self._alive)
        self._fallback.wait(self._fallback.launch(slot))
        self._again(slot)

    @property
    def _engine(self) -> Computes:
        return self._native if self._fallback is None else self._fallback

    def _alive(self) -> None:
        self.progress_at = self._clock()


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
