"""The service: what a connection talks to, and where step results come back.

State: the jobs of each connection and whether new ones are taken. Lives on the event-loop thread; joins admission,
dispatch and emit, and nothing of it waits. Refuses torch, asyncio and gpu: clocks, timers and the engine
come in by constructor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from zl.access import Access
from zl.admission import Admission, Built, Ready, built, text_bytes
from zl.audit import Audit
from zl.dispatch import DispatchCounters, Dispatcher
from zl.emit import EmitCounters, Emitter
from zl.errors import Code, Finish, PeerError, RequestError
from zl.health import Health, Phase
from zl.measures import Landing, Measures
from zl.net import codec
from zl.rows import Job

log = logging.getLogger("zl")

LONG_PROMPT_BYTES = 4_096
"""Texts above this are cut into tokens off the event loop: 5 ms of it would delay the frames of all streams."""


TIMER_S = 0.001
"""What an event loop's timers are exact to."""


@dataclass(slots=True)
class ServiceCounters:
    """Plain counters, read at scrape. `disconnected`: requests whose peer was gone before they ended."""

    requests: int = 0
    refused: int = 0
    disconnected: int = 0


class Service:
    """Answer the requests of all connections.

    engine_nudge  wakes an idle engine so that it sees the control column
    health        what pings are answered by
    call_at       call_at(monotonic seconds, function): the event loop's timer
    offload       offload(work, then): run `work` on another thread, one at a time, then `then(result)` on this one;
                  `work` raises nothing
    encode_token  as codec.encode_token
    """

    def __init__(
        self,
        *,
        admission: Admission,
        dispatcher: Dispatcher,
        info: bytes,
        call_at: Callable[[float, Callable[[], None]], Any],
        offload: Callable[[Callable[[], Built], Callable[[Built], None]], Any],
        engine_nudge: Callable[[], None],
        health: Health,
        clock: Callable[[], float] = time.monotonic,
        encode_token: codec.TokenEncoder = codec.encode_token,
    ):
        self._admission = admission
        self.policy = admission.policy
        self.dispatcher = dispatcher
        self.emitter = Emitter(dispatcher.rows, self._ended, encode_token)
        self._info = info
        self._call_at = call_at
        self._offload = offload
        self._nudge = engine_nudge
        self._clock = clock
        self._jobs: dict[Any, dict[int, Job]] = {}
        self.accepting = True
        self._health = health
        self.counters = ServiceCounters()
        self.measures = Measures()
        self._completed: list[Job] = []  # answers that ended well in the step at hand
        self.audit: Audit | None = None
        self.access: Access | None = None

    # -- what connections call ---------------------------------------------------------------------------------------

    def submit(self, conn: Any, request: codec.Request) -> None:
        """Admit a request, or raise the RequestError that says why not."""
        begun_ns = time.perf_counter_ns()
        now = self._clock()
        self.counters.requests += 1
        try:
            if not self.accepting:
                text = "the server is draining and takes no new requests"
                raise RequestError(Code.DRAINING, text, retry_after_ms=1_000)
            job, build = self._admission.job(conn, request, now)
            job.arrived_ns, job.read_ns, job.parse_ns = begun_ns, request.read_ns, request.parse_ns
            if self.audit is not None:
                self.audit.begin(job)
            self._jobs.setdefault(conn, {})[job.request_id] = job
            try:
                if text_bytes(request) > LONG_PROMPT_BYTES:
                    self.dispatcher.expect(job)
                    self._offload(lambda: built(build), lambda outcome: self._prompt_built(job, outcome))
                else:
                    self._admit(job, build(), begun_ns, now)
            except BaseException:  # whatever it was: nothing of it stays
                self._forget(job)
                self.dispatcher.end(job)
                raise
        except RequestError as refusal:
            self.counters.refused += 1
            refusal.request_id = request.request_id
            if self.access is not None:
                self.access.refused(conn, request, refusal.code)
            raise
        if job.deadline is not None:
            self._call_at(job.deadline, partial(self._at_deadline, job.deadline))

    def refused(self, conn: Any, request: codec.Request | None, code: Code) -> None:
        """Log a request, or a frame that is none, that its conversation refused: it never came to `submit`."""
        if self.access is not None:
            self.access.refused(conn, request, code)

    def cancel(self, conn: Any, request_id: int) -> None:
        """End a request with CANCELLED; an unknown id is ignored (WIRE.md, rule 4)."""
        job = self._jobs.get(conn, {}).get(request_id)
        if job is not None:
            self.emitter.cancel(job, self._clock())
            self._nudge()
            conn.flush()

    def closed(self, conn: Any) -> None:
        """Drop all requests of a connection that is gone."""
        for job in self._jobs.pop(conn, {}).values():
            self.counters.disconnected += 1
            self.measures.left(job)
            job.usage = self.emitter.usage(job, self._clock())
            self._log(job)
            self.dispatcher.end(job)
        self._nudge()

    @property
    def healthy(self) -> bool:
        """Say whether the engine works."""
        return self._health.live

    def server_info(self) -> bytes:
        """Return the encoded ServerInfo."""
        return self._info

    # -- what the engine's results call ------------------------------------------------------------------------------

    def on_step(self, result: Any) -> None:
        """Take a gpu.loop.StepResult: write its frames, free its rows, seat who waits."""
        begun_ns = time.perf_counter_ns()
        now = self._clock()
        rows = self.dispatcher.rows
        decoded = self.measures.decoding.copy()
        self._completed.clear()
        for ticket, n_constant in result.first:
            job = rows.job(ticket)
            if job is not None:
                job.begun = result.before
                job.prompt.give_back()  # gathered
                job.constant_tokens = n_constant
                self.dispatcher.counters.constant_tokens += n_constant
                self.dispatcher.counters.prompt_tokens += len(job.prompt)
        if self.audit is not None:
            self.audit.step(rows, result)
        encode_ns = time.perf_counter_ns()
        touched = self.emitter.step(result.tickets, result.tokens, result.logprobs, result.flags, now, result.after)
        encoded_ns = time.perf_counter_ns()
        for ticket in result.retired:
            self.dispatcher.retire(ticket, now)
        if result.retired:
            self.dispatcher.pump(now)
        pumped_ns = time.perf_counter_ns()
        if result.retired:
            self.measures.schedule.observe((pumped_ns - encoded_ns) * 1e-9)
        for conn in touched:
            conn.flush()
        if result.tickets:
            done_ns = time.perf_counter_ns()
            landing = Landing(
                result.after, begun_ns - result.after.at_ns, encoded_ns - encode_ns,
                pumped_ns - encoded_ns + encode_ns - begun_ns, done_ns - pumped_ns, done_ns,
            )  # fmt: skip
            self.measures.step(landing, decoded, self.emitter.firsts, self._completed)
            if self.access is not None:
                for job in self._completed:
                    self.access.ended(job, done_ns)

    def engine_failed(self, failure: BaseException) -> None:
        """End every request with INTERNAL: the engine is gone."""
        self._health.phase = Phase.FAILED
        self.accepting = False
        error = PeerError(Code.INTERNAL, f"the engine stopped: {type(failure).__name__}; the server is going down")
        self._end_all(error)

    # -- time and drain ----------------------------------------------------------------------------------------------

    def _at_deadline(self, deadline: float) -> None:
        """Take a deadline's timer, which may fire a moment early: the loop counts whole milliseconds."""
        if self._clock() < deadline:
            self._call_at(deadline + TIMER_S, partial(self._at_deadline, deadline))
        else:
            self.expire()

    def expire(self) -> None:
        """End the requests whose deadline has passed."""
        now = self._clock()
        for job in self.dispatcher.expired(now):
            error = PeerError(
                Code.DEADLINE_EXCEEDED, f"the deadline passed after {job.n_new} tokens", request_id=job.request_id
            )
            self.emitter.fail(job, error, now)
            job.conn.flush()
        self._nudge()

    def end_all(self, why: str) -> None:
        """End what still runs when the drain deadline has passed."""
        self._end_all(PeerError(Code.DRAINING, why))

    @property
    def in_flight(self) -> int:
        """Count requests that have not had their last frame."""
        return sum(len(jobs) for jobs in list(self._jobs.values()))

    def start_counting(self) -> None:
        """Begin all figures anew: what the server asked itself before READY is nobody's request.

        Nothing may be in flight.
        """
        self.counters = ServiceCounters()
        self.measures = Measures()
        self.emitter.counters = EmitCounters()
        self.dispatcher.counters = DispatchCounters()
        self.policy.start_counting()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _admit(self, job: Job, prompt: Ready, begun_ns: int, now: float) -> None:
        """Queue a job that has its prompt; `begun_ns`: since when this thread works on it."""
        job.prompt = prompt.ids
        job.prefix_len = prompt.prefix_len
        job.truncated |= prompt.truncated
        admit_ns = time.perf_counter_ns()
        job.tokenize_ns += admit_ns - begun_ns
        self.measures.tokenize.observe(job.tokenize_ns * 1e-9)
        try:
            self.dispatcher.admit(job, now)
        finally:
            job.schedule_ns = time.perf_counter_ns() - admit_ns
            self.measures.schedule.observe(job.schedule_ns * 1e-9)

    def _prompt_built(self, job: Job, found: Built) -> None:
        """Take a prompt that was built off this thread; its request may be over by now."""
        begun_ns = time.perf_counter_ns()
        if job.done:
            return
        now = self._clock()
        try:
            if isinstance(found.outcome, RequestError):
                raise found.outcome
            job.tokenize_ns = found.spent_ns
            self._admit(job, found.outcome, begun_ns, now)
        except RequestError as refusal:
            refusal.request_id = job.request_id
            self.emitter.fail(job, refusal, now)
            job.conn.flush()

    def _ended(self, job: Job) -> None:
        self.measures.left(job)
        if job.finish is not Finish.ERROR and job.finish is not Finish.CANCELLED:
            self._completed.append(job)
        self._log(job)
        self._forget(job)
        self.dispatcher.end(job)
        job.conn.finished(job.request_id)

    def _log(self, job: Job) -> None:
        """Tell the journals of a job that has ended, however it did."""
        if self.audit is not None:
            self.audit.end(job)
        if self.access is not None and job.finish not in (Finish.STOP, Finish.LENGTH):  # these when they are written
            self.access.ended(job, time.perf_counter_ns())

    def _forget(self, job: Job) -> None:
        jobs = self._jobs.get(job.conn)
        if jobs is not None:
            jobs.pop(job.request_id, None)
            if not jobs:
                del self._jobs[job.conn]

    def _end_all(self, error: PeerError) -> None:
        now = self._clock()
        for conn, jobs in list(self._jobs.items()):
            for job in list(jobs.values()):
                self.emitter.fail(job, error, now)
            conn.flush()
        self._nudge()
