"""Rows: the batch seats, their life, epochs and control columns, and the job that sits on each.

State: one life state and epoch a row, the free list, the control column, all written by the event-loop thread alone;
the engine thread reads `epoch` and `control`. Refuses torch, asyncio and net.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from zl.errors import Code, Finish, InvariantError
from zl.ids import Ids
from zl.measures import Breakdown, Moment


class Life(IntEnum):
    """Where a row is in its life, as the event loop sees it."""

    FREE = 0
    LIVE = 1  # seated: the engine computes it, or will at its next step
    ENDING = 2  # its last frame is out; the engine may still touch its pages


class Event(IntEnum):
    """What can happen to a row."""

    SEAT = 0
    END = 1
    RETIRE = 2


TRANSITIONS: dict[tuple[Life, Event], Life] = {
    (Life.FREE, Event.SEAT): Life.LIVE,
    (Life.LIVE, Event.END): Life.ENDING,
    (Life.ENDING, Event.RETIRE): Life.FREE,
}


class Ticket(NamedTuple):
    """A row and the epoch it was handed out in; expires when the row changes owners."""

    row: int
    epoch: int


@dataclass(slots=True, eq=False)
class Job:
    """One request's life on the event-loop side, from admission to its last frame.

    Times are seconds of the monotonic clock. What ends in _ns is what zl.measures sums up:
    `arrived_ns` a stamp at submission, the others time spent on the request, before that to read and parse its frame.
    """

    conn: Any  # has name, queue(frame) and finished(request_id)
    request_id: int
    prompt: Ids
    prefix_len: int
    max_new: int
    sampling: Any
    seed: int
    stream: Any  # text.detok.TextStream
    arrived: float
    deadline: float | None = None
    ignore_eos: bool = False
    logprobs: bool = False
    truncated: bool = False
    ticket: Ticket | None = None
    seated: float = 0.0
    first_token: float = 0.0
    n_new: int = 0
    constant_tokens: int = 0
    prefix: Any = None  # pages.Prefix while it is shared
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    arrived_ns: int = 0
    read_ns: int = 0
    parse_ns: int = 0
    tokenize_ns: int = 0
    schedule_ns: int = 0
    begun: Moment | None = None  # the engine's clock when it began with the prompt
    finish: Finish = Finish.NONE  # how it ended, and with which error
    error: Code = Code.OK
    usage: Any = None  # net.messages.Usage, once it has ended
    breakdown: Breakdown | None = None  # where the time went, of a complete answer
    record: Any = None  # audit.Record where the answer is audited
    done: bool = False
    passed: int = 0  # younger jobs seated while this one waited

    @property
    def profile(self) -> str:
        """Name the sampling profile."""
        name: str = self.sampling.profile.name
        return name

    def glue_ns(self, now: Moment) -> int:
        """Sum what was spent on it so far beside waiting and the model; `now`: the engine's clock."""
        then = self.begun or now
        engine = now.schedule - then.schedule + now.context_load - then.context_load + now.sampling - then.sampling
        return self.read_ns + self.parse_ns + self.tokenize_ns + self.schedule_ns + engine


class Rows:
    """The seats of the batch.

    epoch    uint32 [n_rows], bumped at each seating
    control  uint8 [n_rows], 1 asks the engine to stop computing the row at its next step boundary
    """

    def __init__(self, n_rows: int):
        self.n_rows = n_rows
        self.epoch = np.zeros(n_rows, np.uint32)
        self.control = np.zeros(n_rows, np.uint8)
        self._life = [Life.FREE] * n_rows
        self._jobs: list[Job | None] = [None] * n_rows
        self._free = list(range(n_rows))  # a heap: low rows first keeps the used part of every column dense

    def _move(self, row: int, event: Event) -> None:
        state = self._life[row]
        target = TRANSITIONS.get((state, event))
        if target is None:
            raise InvariantError(f"row {row}: {event.name} is not possible in state {state.name}")
        self._life[row] = target

    @property
    def n_free(self) -> int:
        """Count the rows nobody sits on."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Count the rows that are live or ending."""
        return self.n_rows - len(self._free)

    def count(self, life: Life) -> int:
        """Count the rows in one state; any thread."""
        return self._life.count(life)

    def seat(self, job: Job) -> Ticket:
        """Give the job the lowest free row under a new epoch."""
        if not self._free:
            raise InvariantError("seat: no free row; ask n_free first")
        row = heapq.heappop(self._free)
        self._move(row, Event.SEAT)
        self.epoch[row] += 1
        self.control[row] = 0
        self._jobs[row] = job
        job.ticket = Ticket(row, int(self.epoch[row]))
        return job.ticket

    def end(self, job: Job) -> None:
        """Mark a seated job as over: the engine drops its row at the next step boundary."""
        ticket = self._owned(job)
        self._move(ticket.row, Event.END)
        self.control[ticket.row] = 1

    def retire(self, ticket: Ticket) -> Job:
        """Take the row back once no step can touch it any more."""
        job = self.job(ticket)
        if job is None:
            raise InvariantError(f"retire: ticket {ticket} has expired")
        self._move(ticket.row, Event.RETIRE)
        self._jobs[ticket.row] = None
        job.ticket = None
        heapq.heappush(self._free, ticket.row)
        return job

    def job(self, ticket: Ticket) -> Job | None:
        """Find the ticket's job; None where the ticket has expired."""
        if self.epoch[ticket.row] != ticket.epoch:
            return None
        return self._jobs[ticket.row]

    def live(self, ticket: Ticket) -> Job | None:
        """Find the ticket's job if it still takes tokens."""
        job = self.job(ticket)
        return job if job is not None and not job.done else None

    def jobs(self) -> list[Job]:
        """List the jobs that have a row."""
        return [job for job in self._jobs if job is not None]

    def _owned(self, job: Job) -> Ticket:
        if job.ticket is None or self.job(job.ticket) is not job:
            raise InvariantError(f"job of request {job.request_id} does not own a row")
        return job.ticket

    def check(self) -> None:
        """Recount from nothing; raise InvariantError where the books do not balance."""
        free = {row for row in range(self.n_rows) if self._life[row] is Life.FREE}
        if free != set(self._free) or len(free) != len(self._free):
            raise InvariantError(f"rows: free list has {len(self._free)} entries, {len(free)} rows are free")
        for row, job in enumerate(self._jobs):
            if (job is None) != (row in free):
                raise InvariantError(f"row {row}: state {self._life[row].name}, job {job!r}")
            if job is not None and job.ticket != Ticket(row, int(self.epoch[row])):
                raise InvariantError(f"row {row}: job holds {job.ticket}, epoch is {self.epoch[row]}")
