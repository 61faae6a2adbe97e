"""The dispatcher: who gets a row and pages, who waits, who is turned away.

State: the queue and the jobs in flight; lives on the event-loop thread, takes the time as an argument and never waits.
Pages are reserved at admission for the whole request, so a seated request always finishes: no preemption, no deadlock.
Refuses torch, asyncio, net and gpu (the columns come in by constructor).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zl.errors import Code, InvariantError, RequestError
from zl.pages import PageBooks
from zl.rows import Job, Rows, Ticket
from zl.sampling import profiles
from zl.shapes import PAGE, Shapes, pages_for

MAX_PASSED = 1_024
"""Younger jobs that may be seated before one that does not fit yet; then the queue waits for it, so nobody starves."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What admission allows."""

    max_queue: int = 1_024
    share_prefixes: bool = True


@dataclass(slots=True)
class DispatchCounters:
    """Plain counters, read at scrape."""

    admitted: int = 0
    overloaded: int = 0
    seated: int = 0
    retired: int = 0
    truncated: int = 0
    prompt_tokens: int = 0  # of requests that the engine has begun
    constant_tokens: int = 0


class Dispatcher:
    """Seat jobs on rows, first come first served among those that fit.

    columns  gpu.pinned.RowColumns, written here for rows that are being seated
    notify   called with each Ticket, its prefix, prompt length and sampling program once its columns are complete:
             the crossing to the engine thread
    limits   what admission allows; may be exchanged at any time
    """

    def __init__(
        self,
        shapes: Shapes,
        rows: Rows,
        pages: PageBooks,
        columns: Any,
        notify: Callable[[Ticket, Any, int, int], None],
        limits: Limits | None = None,
    ):
        self._shapes = shapes
        self.rows = rows
        self._pages = pages
        self._columns = columns
        self._notify = notify
        self.limits = limits or Limits()
        self._queue: deque[Job] = deque()
        self._expected: set[Job] = set()  # their prompts are still being built
        self._finish_times: deque[float] = deque(maxlen=64)
        self.counters = DispatchCounters()

    @property
    def queued(self) -> int:
        """Count the jobs that wait for a row."""
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """Count the jobs that wait for a row, or for their prompt."""
        return len(self._queue) + len(self._expected)

    @property
    def unusable_pages(self) -> int:
        """Count the pages that could be handed out now but are no use to the oldest waiting job; any thread."""
        try:
            oldest = self._queue[0]
        except IndexError:
            return 0
        return self._pages.available() % pages_for(len(oldest.prompt) + oldest.max_new)

    def ensure_room(self, now: float) -> None:
        """Raise OVERLOADED, with a hint when to come back, where the queue has no place left."""
        n_waiting = self.waiting
        if n_waiting < self.limits.max_queue:
            return
        self.counters.overloaded += 1
        raise RequestError(
            Code.OVERLOADED,
            f"all {self.rows.n_rows} rows are busy and {n_waiting} requests wait; try again later",
            retry_after_ms=self._retry_after_ms(now),
        )

    def prompt_budget(self, max_tokens: int) -> tuple[int, int]:
        """Return (most prompt tokens, answer tokens) for a request that may have `max_tokens` (0: the default).

        An answer is never cut below an eighth of the model length for the prompt's sake, unless it asks for less.
        """
        max_new = min(max_tokens or self._shapes.default_tokens, self._shapes.max_model_len - 1)
        reserve = min(max_new, max(1, self._shapes.max_model_len // 8))
        return self._shapes.max_model_len - reserve, max_new

    def expect(self, job: Job) -> None:
        """Keep a place for a job whose prompt is still being built; `admit` or `end` takes it from there."""
        self._expected.add(job)

    def admit(self, job: Job, now: float) -> None:
        """Queue a job whose prompt is known, and seat what can be seated; RequestError: it can never fit."""
        self._expected.discard(job)
        job.max_new = min(job.max_new, self._shapes.max_model_len - len(job.prompt))
        need = pages_for(len(job.prompt) + job.max_new)
        if need > self._pages.n_pages:
            raise RequestError(
                Code.LIMIT_EXCEEDED,
                f"prompt of {len(job.prompt)} and answer of {job.max_new} tokens need {need} KV pages, "
                f"the server has {self._pages.n_pages} (kv_memory); ask for fewer max_tokens",
                field="max_tokens",
            )
        self.counters.admitted += 1
        self.counters.truncated += job.truncated
        self._queue.append(job)
        self.pump(now)

    def pump(self, now: float) -> None:
        """Seat every waiting job that fits now, oldest first."""
        if not self._queue or not self.rows.n_free:
            return
        waiting: list[Job] = []
        try:
            while self._queue and self.rows.n_free:
                job = self._queue.popleft()
                if job.done:
                    continue
                if self._seat(job, now):
                    for older in waiting:
                        older.passed += 1
                else:
                    waiting.append(job)
                    if job.passed >= MAX_PASSED:
                        break
        finally:
            self._queue.extendleft(reversed(waiting))

    def end(self, job: Job) -> None:
        """Drop a job that has sent, or will never send, its last frame; its row is freed when the engine retires it."""
        if job.done:
            return
        job.done = True
        if job.ticket is not None:
            self.rows.end(job)  # a step in flight may still gather its prompt
            return
        job.prompt.give_back()
        if job in self._expected:
            self._expected.remove(job)
        elif job in self._queue:
            self._queue.remove(job)

    def retire(self, ticket: Ticket, now: float) -> None:
        """Free a row and its pages: no step that touches them is in flight any more."""
        job = self.rows.retire(ticket)
        job.prompt.give_back()
        self._pages.give(job.pages)
        if job.prefix is not None:
            self._pages.unshare(job.prefix)
        job.prefix = None
        job.pages = job.pages[:0]
        self._columns.page_table[ticket.row].fill(-1)
        self.counters.retired += 1
        self._finish_times.append(now)

    def pin(self, prompt: np.ndarray, prefix_len: int) -> int:
        """Keep the constant pages of a prompt for good; return how many tokens these hold, 0 where there are none.

        prompt      int32, all tokens of a request whose prefix has been computed
        prefix_len  text.prompt.Prompt.prefix_len
        """
        n_shared = shareable(prefix_len, len(prompt))
        prefix = self._pages.find_prefix(prompt[:n_shared]) if n_shared else None
        if prefix is None or not prefix.ready:
            return 0
        self._pages.pin(prefix)
        return n_shared

    def pages_left(self) -> int:
        """Count the pages that requests could have now."""
        return self._pages.available()

    def expired(self, now: float) -> list[Job]:
        """List the jobs, waiting or seated, whose deadline has passed."""
        jobs = [*self._expected, *self._queue, *self.rows.jobs()]
        return [job for job in jobs if job.deadline is not None and now >= job.deadline and not job.done]

    def check(self) -> None:
        """Recount rows and pages from nothing."""
        self.rows.check()
        self._pages.check([job.pages for job in self.rows.jobs()])

    def _seat(self, job: Job, now: float) -> bool:
        n_shared = self._shareable(job)
        need = pages_for(len(job.prompt) + job.max_new)
        # Before the ids are looked at: with the prefix found or not, so many pages are needed at least.
        if need - n_shared // PAGE > self._pages.available():
            return False
        if not job.prompt.there:
            raise InvariantError(f"request {job.request_id}: its berth was given back before it was seated")
        key = job.prompt.head(n_shared) if n_shared else None
        prefix = self._pages.find_prefix(key) if key is not None else None
        if prefix is not None:
            self._pages.share(prefix)  # first, so that making room cannot evict it
            if need - len(prefix.pages) > self._pages.available():
                self._pages.unshare(prefix)
                return False
        elif need > self._pages.available():
            return False
        elif key is not None:
            prefix = self._pages.new_prefix(key)
        shared = prefix.pages if prefix is not None else job.pages[:0]
        job.pages = self._pages.take(need - len(shared))
        job.prefix = prefix
        ticket = self.rows.seat(job)
        self._write_columns(ticket.row, job, np.concatenate([shared, job.pages]))
        job.seated = now
        self.counters.seated += 1
        self._notify(ticket, prefix, len(job.prompt), profiles.program_of(job.sampling))
        return True

    def _shareable(self, job: Job) -> int:
        """Count the prompt tokens that may live on constant pages."""
        if not self.limits.share_prefixes:
            return 0
        return shareable(job.prefix_len, len(job.prompt))

    def _write_columns(self, row: int, job: Job, table: np.ndarray) -> None:
        columns = self._columns
        columns.put_prompt(row, job.prompt.own, job.prompt.pieces)
        columns.max_new[row] = job.max_new
        columns.page_table[row, : len(table)] = table
        logprobs = job.logprobs or job.record is not None
        profiles.write(columns, row, job.sampling, seed=job.seed, ignore_eos=job.ignore_eos, logprobs=logprobs)

    def _retry_after_ms(self, now: float) -> int:
        """Guess when a place will be free: the mean time between recent finishes, bounded to 0.05 to 10 s."""
        times = self._finish_times
        gap = (now - times[0]) / len(times) if times else 0.5
        return int(min(10.0, max(0.05, gap)) * 1_000)


def shareable(prefix_len: int, n_prompt: int) -> int:
    """Count a prompt's tokens that may live on constant pages: whole pages of the system part, never the last token."""
    return min(prefix_len, n_prompt - 1) // PAGE * PAGE
