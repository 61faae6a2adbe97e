"""Emit: a step's result becomes response frames.

State: counters only; what a row has said so far lives in its job. Runs on the event-loop thread.
Refuses torch, asyncio, gpu, dispatch and net/protocol: a connection is whatever has `queue(frame)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from zl.errors import Code, Finish, PeerError
from zl.flags import EOS, LENGTH, NUMERIC
from zl.measures import START, Moment
from zl.net import codec
from zl.rows import Job, Rows, Ticket


@dataclass(slots=True)
class EmitCounters:
    """Plain counters, read at scrape. Each answer counts once, in `finished`; under ERROR also in `errors`, by code."""

    tokens: int = 0
    finished: dict[Finish, int] = field(default_factory=lambda: dict.fromkeys(Finish, 0))
    errors: dict[Code, int] = field(default_factory=lambda: dict.fromkeys(Code, 0))


class Emitter:
    """Turn tokens into frames and decide where an answer ends.

    on_end        called once with each job after its last frame is queued
    encode_token  as codec.encode_token
    firsts        jobs whose first token the last step brought
    """

    def __init__(
        self, rows: Rows, on_end: Callable[[Job], None], encode_token: codec.TokenEncoder = codec.encode_token
    ):
        self._encode_token = encode_token
        self._rows = rows
        self._on_end = on_end
        self.counters = EmitCounters()
        self.firsts: list[Job] = []
        self._engine = START

    def step(
        self,
        tickets: Iterable[Ticket],
        tokens: list[int],
        logprobs: list[float],
        flags: list[int],
        now: float,
        engine: Moment = START,
    ) -> set[Any]:
        """Queue one frame for each live row; return the connections that have something to write.

        engine  the engine's clock when the step had landed
        """
        touched: set[Any] = set()
        self.firsts = firsts = []
        self._engine = engine
        n = n_bare = 0
        for ticket, token, logprob, flag in zip(tickets, tokens, logprobs, flags, strict=True):
            job = self._rows.live(ticket)
            if job is None:
                continue
            touched.add(job.conn)
            n += 1
            if not job.n_new:
                job.first_token = now
            if flag & (EOS | NUMERIC):
                n_bare += 1
                self._last_without_token(job, flag, now)
                continue
            first = job.n_new == 0
            if first:
                firsts.append(job)
            job.n_new += 1
            text = job.stream.push(token)
            if job.stream.stopped or flag & LENGTH:
                if not job.stream.stopped:
                    text += job.stream.finish()
                finish = Finish.STOP if job.stream.stopped else Finish.LENGTH
                self._last(job, finish, now, [token], text, [logprob] if job.logprobs else [], None)
                continue
            seed = job.seed if first else None
            job.conn.queue(self._encode_token(job.request_id, token, text, logprob if job.logprobs else None, seed))
        self.counters.tokens += n - n_bare
        return touched

    def cancel(self, job: Job, now: float) -> None:
        """Queue the last frame of a cancelled request."""
        self._last(job, Finish.CANCELLED, now, [], job.stream.finish(), [], None)

    def fail(self, job: Job, error: PeerError, now: float) -> None:
        """Queue the last frame of a request that ends with an error."""
        self._last(job, Finish.ERROR, now, [], job.stream.finish(), [], error)

    def usage(self, job: Job, now: float) -> codec.Usage:
        """Tell what a job has taken so far."""
        first_token = job.first_token or now
        seated = job.seated or now
        return codec.Usage(
            prompt_tokens=len(job.prompt),
            completion_tokens=job.n_new,
            constant_tokens=job.constant_tokens,
            truncated=job.truncated,
            queue_us=_us(seated - job.arrived),
            prefill_us=_us(first_token - seated),
            decode_us=_us(now - first_token),
            glue_us=job.glue_ns(self._engine) // 1_000,
        )

    def _last_without_token(self, job: Job, flag: int, now: float) -> None:
        if flag & NUMERIC:
            error = PeerError(
                Code.NUMERIC,
                f"the model's logits for token {job.n_new} are not finite; the request ended, others are not affected",
                request_id=job.request_id,
            )
            self.fail(job, error, now)
        else:
            self._last(job, Finish.STOP, now, [], job.stream.finish(), [], None)

    def _last(
        self,
        job: Job,
        finish: Finish,
        now: float,
        tokens: list[int],
        text: bytes,
        logprobs: list[float],
        error: PeerError | None,
    ) -> None:
        usage = job.usage = self.usage(job, now)
        first = job.n_new <= len(tokens)
        frame = codec.encode_last(
            job.request_id, tokens, text, logprobs, finish, usage, error, job.seed if first else None
        )
        job.conn.queue(frame)
        job.finish = finish
        self.counters.finished[finish] += 1
        if error is not None:
            job.error = error.code
            self.counters.errors[error.code] += 1
        self._on_end(job)


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
