"""The service: what a connection talks to, and where step results come back.

State: the jobs of each connection and whether new ones are taken. Lives on the event-loop thread; joins prompt
building, dispatch and emit, and nothing of it waits. Refuses torch, asyncio and gpu: clocks, timers and the engine
come in by constructor.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zl.dispatch import Dispatcher
from zl.emit import Emitter
from zl.errors import Code, PeerError, RequestError
from zl.health import Health, Phase
from zl.net import codec
from zl.ops.requests import RequestLog
from zl.rows import Job
from zl.sampling import profiles
from zl.text.detok import TextStream, TokenTable
from zl.text.prompt import Prompt, PromptBuilder

log = logging.getLogger("zl")

LONG_PROMPT_BYTES = 4_096
"""Texts above this are cut into tokens off the event loop: 5 ms of it would delay the frames of all streams."""

NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True)
class ServiceCounters:
    """Plain counters, read at scrape; nanoseconds of the event-loop thread."""

    requests: int = 0
    refused: int = 0
    prompt_ns: int = 0
    step_ns: int = 0


class Built(NamedTuple):
    """What building a prompt off the event loop came to."""

    outcome: Prompt | RequestError
    spent_ns: int


class Service:
    """Answer the requests of all connections.

    engine_nudge  wakes an idle engine so that it sees the control column
    health        what pings are answered by
    requests      the request log; by default it says nothing
    call_at       call_at(monotonic seconds, function): the event loop's timer
    offload       offload(work, then): run `work` on another thread, one at a time, then `then(result)` on this one;
                  `work` raises nothing
    """

    def __init__(
        self,
        *,
        prompts: PromptBuilder,
        tokens: TokenTable,
        vocab_size: int,
        dispatcher: Dispatcher,
        info: bytes,
        call_at: Callable[[float, Callable[[], None]], Any],
        offload: Callable[[Callable[[], Built], Callable[[Built], None]], Any],
        engine_nudge: Callable[[], None],
        health: Health,
        requests: RequestLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._prompts = prompts
        self._tokens = tokens
        self._vocab_size = vocab_size
        self.dispatcher = dispatcher
        self._requests = requests or RequestLog()
        self.emitter = Emitter(dispatcher.rows, self._ended, self._requests.ended)
        self._info = info
        self._call_at = call_at
        self._offload = offload
        self._nudge = engine_nudge
        self._clock = clock
        self._jobs: dict[Any, dict[int, Job]] = {}
        self.accepting = True
        self._health = health
        self.counters = ServiceCounters()

    # -- what connections call ---------------------------------------------------------------------------------------

    def submit(self, conn: Any, request: codec.Request) -> None:
        """Admit a request, or raise the RequestError that says why not."""
        begun = time.perf_counter_ns()
        now = self._clock()
        self.counters.requests += 1
        try:
            job, build = self._job(conn, request, now)
            if _text_bytes(request) > LONG_PROMPT_BYTES:
                self.dispatcher.expect(job)
                self._offload(lambda: _built(build), lambda built: self._prompt_built(job, built))
            else:
                self._admit(job, build(), begun, now)
        except RequestError as refusal:
            self._refused(conn, request, refusal)
            raise
        self._jobs.setdefault(conn, {})[job.request_id] = job
        self._requests.began(conn, request)
        if job.deadline is not None:
            self._call_at(job.deadline, self.expire)

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
            self._requests.gone(job)
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
        begun = time.perf_counter_ns()
        now = self._clock()
        rows = self.dispatcher.rows
        for ticket, n_constant in result.first:
            job = rows.job(ticket)
            if job is not None:
                job.constant_tokens = n_constant
                self.dispatcher.counters.constant_tokens += n_constant
        touched = self.emitter.step(result.tickets, result.tokens, result.logprobs, result.flags, now)
        for ticket in result.retired:
            self.dispatcher.retire(ticket, now)
        if result.retired:
            self.dispatcher.pump(now)
        for conn in touched:
            conn.flush()
        self.counters.step_ns += time.perf_counter_ns() - begun

    def engine_failed(self, failure: BaseException) -> None:
        """End every request with INTERNAL: the engine is gone."""
        self._health.phase = Phase.FAILED
        self.accepting = False
        error = PeerError(Code.INTERNAL, f"the engine stopped: {type(failure).__name__}; the server is going down")
        self._end_all(error)

    # -- time and drain ----------------------------------------------------------------------------------------------

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
        return sum(len(jobs) for jobs in self._jobs.values())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _job(self, conn: Any, request: codec.Request, now: float) -> tuple[Job, Callable[[], Prompt]]:
        """Make the job of a request, and what builds its prompt; RequestError: it is refused."""
        if not self.accepting:
            raise RequestError(Code.DRAINING, "the server is draining and takes no new requests", retry_after_ms=1_000)
        self.dispatcher.ensure_room(now)
        tokens = request.encoding == codec.Encoding.TOKENS
        if tokens:
            codec.check_tokens(request, self._vocab_size)
        budget, max_new = self.dispatcher.prompt_budget(request.max_tokens)
        job = Job(
            conn=conn,
            request_id=request.request_id,
            prompt=NO_TOKENS,
            prefix_len=0,
            max_new=max_new,
            sampling=profiles.resolve(request.type, request.temperature, request.top_p, request.repetition_penalty),
            seed=request.seed if request.seed is not None else int.from_bytes(os.urandom(8), "little"),
            stream=TextStream(self._tokens, request.stop),
            arrived=now,
            deadline=now + request.deadline_ms / 1_000 if request.deadline_ms else None,
            ignore_eos=request.ignore_eos,
            logprobs=request.logprobs,
        )
        return job, partial(self._prompts.build, request.system, request.messages, request.context, tokens, budget)

    def _admit(self, job: Job, prompt: Prompt, begun: int, now: float) -> None:
        """Queue a job that has its prompt; `begun`: since when this thread works on it."""
        job.prompt = np.array(prompt.ids, np.int32)
        job.prefix_len = prompt.prefix_len
        job.truncated = prompt.truncated
        spent = time.perf_counter_ns() - begun
        job.glue_ns += spent
        self.counters.prompt_ns += spent
        self.dispatcher.admit(job, now)

    def _prompt_built(self, job: Job, built: Built) -> None:
        """Take a prompt that was built off this thread; its request may be over by now."""
        begun = time.perf_counter_ns()
        if job.done:
            return
        now = self._clock()
        try:
            if isinstance(built.outcome, RequestError):
                raise built.outcome
            job.glue_ns += built.spent_ns
            self.counters.prompt_ns += built.spent_ns
            self._admit(job, built.outcome, begun, now)
        except RequestError as refusal:
            refusal.request_id = job.request_id
            self.emitter.fail(job, refusal, now)
            job.conn.flush()

    def _refused(self, conn: Any, request: codec.Request, refusal: RequestError) -> None:
        self.counters.refused += 1
        refusal.request_id = request.request_id
        self._requests.refused(conn, request, refusal)

    def _ended(self, job: Job) -> None:
        self._forget(job)
        self.dispatcher.end(job)
        job.conn.finished(job.request_id)

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


def _text_bytes(request: codec.Request) -> int:
    if request.encoding == codec.Encoding.TOKENS:
        return 0
    return len(request.system) + len(request.context) + sum(map(len, request.messages))


def _built(build: Callable[[], Prompt]) -> Built:
    begun = time.perf_counter_ns()
    try:
        outcome: Prompt | RequestError = build()
    except RequestError as refusal:
        outcome = refusal
    except Exception as failure:  # a fault of ours must end the request, not leave it hanging
        log.exception("building a prompt failed")
        outcome = RequestError(Code.INTERNAL, f"the prompt could not be built: {type(failure).__name__}")
    return Built(outcome, time.perf_counter_ns() - begun)
