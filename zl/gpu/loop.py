"""The generation loop: plans steps from numpy columns, launches them, publishes their results.

State: the rows it computes and how far each one is; the engine thread owns all of it. The event loop hands in tickets
through `seat` and reads results through `publish`; nothing else crosses. Refuses net, text, dispatch and asyncio.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from zl.gpu.chunks import Seat, share_out
from zl.gpu.nvtx import Mark, unmarked
from zl.gpu.pacing import Pacer
from zl.gpu.patience import Patience
from zl.gpu.pinned import EOS, FIRST, LENGTH, NUMERIC, SAMPLE, SKIPPED, StepSlot
from zl.measures import START, EngineTimes, Moment
from zl.rows import Ticket
from zl.sampling.profiles import GENERIC, PROGRAMS
from zl.shapes import TOKEN_BUCKETS, Shapes
from zl.threads import name_this_thread

ENDED = EOS | LENGTH | NUMERIC
SAMPLED_BY = (*PROGRAMS, "mixed", "none")
"""What samples a step's rows: one program, several, or none because nothing is drawn."""
_MIXED, _NONE = len(PROGRAMS), len(PROGRAMS) + 1
TICK_S = 0.5
"""An idle loop turns this often, so that its silence means that it is stuck."""


class StepResult(NamedTuple):
    """One finished step, in host memory that nobody rewrites.

    tickets    rows that drew a token, in order
    tokens, logprobs, flags   one entry a ticket; flags as in gpu.pinned
    retired    tickets that no step in flight can touch any more
    before, after   the engine thread's clock when it began to plan the step, and when it had landed it
    """

    tickets: list[Ticket]
    tokens: list[int]
    logprobs: list[float]
    flags: list[int]
    first: list[tuple[Ticket, int]]  # rows that began, with the tokens they took from constant pages
    retired: list[Ticket]
    before: Moment = START
    after: Moment = START


@dataclass(slots=True)
class LoopCounters:
    """Plain counters, read at scrape.

    hits      steps by size, an index in `buckets`, and by what sampled their rows, an index in SAMPLED_BY
    buckets   the build's step sizes in tokens, ascending: a step counts under the first that holds it
    fallback  steps that the slow twin computed
    """

    buckets: tuple[int, ...]
    hits: list[list[int]]
    steps: int = 0
    fallback: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    turned_at: float = field(default_factory=time.monotonic)  # newest sign of progress: a turn, or a step that ended
    patience_s: float = 0.0  # how long the steps in flight may take before they count as stuck
    times: EngineTimes = field(default_factory=lambda: EngineTimes(time.perf_counter_ns()))

    @property
    def by_program(self) -> list[int]:
        """Count steps by what sampled them, an entry for each of SAMPLED_BY."""
        return [sum(column) for column in zip(*self.hits, strict=True)]


def no_inner_clock() -> tuple[int, int]:
    """Stand in for the clock of a program that keeps none: context_load and sampling are 0."""
    return 0, 0


class _Flight(NamedTuple):
    seq: int
    slot: int
    number: int
    drawn: list[Seat | None]  # by segment: the seat if it samples
    first: list[tuple[Ticket, int]]
    n_decode: int
    n_prefill: int
    n_prompts: int
    launched_ns: int
    before: Moment


class GenerationLoop:
    """Run the steps of all seated rows on one thread.

    engine     launch(slot) -> seq, wait(seq), fallback: gpu.programs
    slots      StepSlots used in turn; their number less one is how far the loop runs ahead
    control    uint8 [max_rows], rows.Rows.control
    publish    called on the engine thread with each StepResult
    on_failure called once with the exception if a step fails; the loop has stopped then
    between    called on the engine thread at step boundaries with nothing in flight (gpu.guard); gives the seconds
               until an idle loop is to call it again
    due        tells that `between` has something to do: steps in flight are waited for, and none is launched before
    mark       wraps the planning of a step in a range (gpu.nvtx)
    inner_ns   gives what the newest step spent on loading its context and on sampling by the program's own clock,
               (0, 0) where it keeps none
    """

    def __init__(
        self,
        shapes: Shapes,
        engine: Any,
        slots: list[StepSlot],
        control: np.ndarray,
        publish: Callable[[StepResult], None],
        on_failure: Callable[[BaseException], None],
        *,
        run_ahead: int = 0,
        chunk_tokens: int = 64,
        between: Callable[[], float | None] | None = None,
        due: Callable[[], bool] | None = None,
        mark: Mark = unmarked,
        inner_ns: Callable[[], tuple[int, int]] = no_inner_clock,
    ):
        if not 0 <= run_ahead < len(slots):
            raise ValueError(f"run_ahead {run_ahead} needs {run_ahead + 1} slots, {len(slots)} given")
        self._shapes = shapes
        self._engine = engine
        self._slots = slots
        self._control = control
        self._publish = publish
        self._on_failure = on_failure
        self._run_ahead = run_ahead
        self._between = between
        self._due = due
        self._plan = mark("plan", self._launch)
        self._inner_ns = inner_ns
        self._pacer = Pacer(chunk_tokens, shapes.step_tokens)
        self._patience = Patience()
        self._inbox: deque[Seat] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._prefill: list[Seat] = []
        self._decode: list[Seat] = []
        self._leaving: list[Seat] = []
        self._flights: deque[_Flight] = deque()
        self._sampling = [0] * len(PROGRAMS)  # decoding seats by what samples them
        self._number = 0
        self._ended = -1  # the newest step that has ended
        buckets = (*(n for n in TOKEN_BUCKETS if n < shapes.step_tokens), shapes.step_tokens)
        self.counters = LoopCounters(buckets, [[0] * len(SAMPLED_BY) for _ in buckets])
        self._times = self.counters.times
        self._thread = threading.Thread(target=self._run, name="zl-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def seat(self, ticket: Ticket, prefix: Any, prompt_len: int, program: int = GENERIC) -> None:
        """Hand over a row whose columns are complete; any thread."""
        self._inbox.append(Seat(ticket, prompt_len, prefix, program))
        self._wake.set()

    def nudge(self) -> None:
        """Make an idle loop look at the control column; any thread."""
        self._wake.set()

    def stop(self) -> None:
        """End after the steps in flight and join the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Tell whether the thread runs."""
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Tell whether there is work: rows seated or steps in flight."""
        return bool(self._inbox or self._prefill or self._decode or self._flights or self._leaving)

    def _run(self) -> None:
        name_this_thread(self._thread.name)
        try:
            while not self._stopping:
                self._turn()
            while self._flights:
                self._land(self._flights.popleft())
        except BaseException as failure:  # the thread's last word: whatever it was, the event loop must hear of it
            self._on_failure(failure)

    def _turn(self) -> None:
        self._wake.clear()
        self.counters.turned_at = time.monotonic()
        while self._flights and self._due is not None and self._due():
            self._land(self._flights.popleft())
        (self._times.scheduled if self.busy else self._times.idled)(time.perf_counter_ns())
        pause = None
        if self._between is not None and not self._flights:
            pause = self._between()
            self._times.watched(time.perf_counter_ns())
        before = self._times.moment()
        while self._inbox:
            self._prefill.append(self._inbox.popleft())
        self._drop_ended()
        launched = self._plan(before)
        if launched and len(self._flights) <= self._run_ahead:
            return
        if self._flights:
            self._land(self._flights.popleft())
        elif self._leaving:
            self._publish(StepResult([], [], [], [], [], self._retire()))
        elif not launched and not self._inbox:
            self._wake.wait(TICK_S if pause is None else min(pause, TICK_S))  # sync
            self._times.idled(time.perf_counter_ns())

    def _drop_ended(self) -> None:
        """Stop computing the rows that the control column names."""
        control = self._control
        for seats in (self._prefill, self._decode):
            dropped = [seat for seat in seats if control[seat.ticket.row]]
            if dropped:
                self._leave(dropped)
                seats[:] = [seat for seat in seats if not seat.gone]

    def _leave(self, seats: list[Seat]) -> None:
        for seat in seats:
            if not seat.gone:
                seat.gone = True
                self._sampling[seat.program] -= seat.decoding
                self._leaving.append(seat)

    def _retire(self) -> list[Ticket]:
        retired = [seat.ticket for seat in self._leaving if seat.last_step <= self._ended]
        if retired:
            self._leaving = [seat for seat in self._leaving if seat.last_step > self._ended]
        return retired

    def _launch(self, before: Moment) -> bool:
        """Plan and launch one step; False where no row has anything to compute. `before`: the clock at the start."""
        if not self._prefill and not self._decode:
            return False
        number = self._number
        index = number % len(self._slots)
        slot = self._slots[index]
        drawn: list[Seat | None] = []
        first: list[tuple[Ticket, int]] = []
        n = n_decode = len(self._decode)
        if n:
            rows = [seat.ticket.row for seat in self._decode]
            slot.seg_row[:n] = rows
            slot.seg_start[:n] = [seat.computed for seat in self._decode]
            slot.seg_len[:n] = 1
            slot.seg_flags[:n] = SAMPLE
            for seat in self._decode:
                seat.computed += 1
                seat.last_step = number
            drawn.extend(self._decode)
        grown: list[Seat] = []
        n_prefill = n_prompts = 0
        for seat, take in share_out(self._prefill, self._shapes.step_tokens - n, self._pacer.chunk if n else None):
            flags = 0
            if not seat.begun:
                flags |= FIRST
                seat.begun = True
                first.append((seat.ticket, seat.computed))
            end = seat.computed + take
            if end == seat.prompt_len:
                flags |= SAMPLE
                grown.append(seat)
            slot.seg_row[n] = seat.ticket.row
            slot.seg_start[n] = seat.computed
            slot.seg_len[n] = take
            slot.seg_flags[n] = flags
            seat.computed = end
            seat.last_step = number
            if seat.prefix is not None and end > seat.prefix.n_done:
                seat.prefix.n_done = min(end, seat.prefix.n_tokens)
            drawn.append(seat if flags & SAMPLE else None)
            n_prefill += take
            n_prompts += 1
            n += 1
        if not n:
            return False
        slot.n_segs[0] = n
        before_it = sum(flight.n_decode + flight.n_prefill for flight in self._flights)
        self.counters.patience_s = self._patience.limit_s(before_it + n_decode + n_prefill)
        launched_ns = time.perf_counter_ns()
        self._times.scheduled(launched_ns)
        seq = self._engine.launch(index)
        self._times.replayed(time.perf_counter_ns())
        self._number += 1
        for seat in grown:
            seat.decoding = True
            self._sampling[seat.program] += 1
        if grown:
            self._decode.extend(grown)
            self._prefill = [seat for seat in self._prefill if seat.computed < seat.prompt_len]
        self._count_hit(n_decode + n_prefill)
        self.counters.decode_tokens += n_decode
        self.counters.prefill_tokens += n_prefill
        self._flights.append(
            _Flight(seq, index, number, drawn, first, n_decode, n_prefill, n_prompts, launched_ns, before)
        )
        return True

    def _count_hit(self, n_tokens: int) -> None:
        """Book size and sampling of the step just launched: its rows are those that decode now, the grown ones too."""
        present = [program for program, n_rows in enumerate(self._sampling) if n_rows]
        sampled_by = present[0] if len(present) == 1 else _MIXED if present else _NONE
        self.counters.hits[bisect_left(self.counters.buckets, n_tokens)][sampled_by] += 1

    def _land(self, flight: _Flight) -> None:
        """Wait for a step to end, drop the rows that it finished, publish."""
        self._times.scheduled(time.perf_counter_ns())
        self._engine.wait(flight.seq)  # sync
        ended_ns = time.perf_counter_ns()
        self._times.replayed(ended_ns)
        self._ended = flight.number
        elapsed = ended_ns - flight.launched_ns
        self.counters.steps += 1
        self.counters.fallback += self._engine.fallback
        self._times.landed(elapsed, *self._inner_ns())
        self.counters.turned_at = time.monotonic()
        self._patience.landed(flight.n_decode + flight.n_prefill, elapsed)
        self._pacer.landed(flight.n_decode, flight.n_prefill, flight.n_prompts, elapsed)
        slot = self._slots[flight.slot]
        n = len(flight.drawn)
        tokens = slot.out_token[:n].tolist()
        logprobs = slot.out_logprob[:n].tolist()
        flags = slot.out_flags[:n].tolist()
        keep = [i for i, seat in enumerate(flight.drawn) if seat is not None and not flags[i] & SKIPPED]
        ended = [seat for i in keep if flags[i] & ENDED and (seat := flight.drawn[i]) is not None]
        if ended:
            self._leave(ended)
            self._decode = [seat for seat in self._decode if not seat.gone]
        result = StepResult(
            [seat.ticket for i in keep if (seat := flight.drawn[i]) is not None],
            [tokens[i] for i in keep],
            [logprobs[i] for i in keep],
            [flags[i] for i in keep],
            flight.first,
            self._retire(),
            flight.before,
            self._times.landing(time.perf_counter_ns()),
        )
        self._publish(result)
