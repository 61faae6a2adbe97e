"""Emit: a step's result becomes response frames.

State: counters only; what a row has said so far lives in its job. Runs on the event-loop thread.
Refuses torch, asyncio, gpu, dispatch and net/protocol: a connection is whatever has `queue(frame)`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from zl.errors import Code, Finish, PeerError
from zl.flags import EOS, LENGTH, NUMERIC
from zl.net import codec
from zl.rows import Job, Rows, Ticket


@dataclass(slots=True)
class EmitCounters:
    """Plain counters, read at scrape."""

    tokens: int = 0
    frames: int = 0
    finished: dict[Finish, int] = field(default_factory=lambda: dict.fromkeys(Finish, 0))
    encode_ns: int = 0


class Emitter:
    """Turn tokens into frames and decide where an answer ends.

    on_end   called once with each job after its last frame is queued
    on_last  called before that with what the last frame says
    """

    def __init__(
        self,
        rows: Rows,
        on_end: Callable[[Job], None],
        on_last: Callable[[Job, Finish, codec.Usage, PeerError | None], None] | None = None,
    ):
        self._rows = rows
        self._on_end = on_end
        self._on_last = on_last
        self.counters = EmitCounters()

    def step(
        self,
        tickets: Iterable[Ticket],
        tokens: list[int],
        logprobs: list[float],
        flags: list[int],
        now: float,
    ) -> set[Any]:
        """Queue one frame for each live row; return the connections that have something to write."""
        begun = time.perf_counter_ns()
        touched: set[Any] = set()
        n = 0
        for ticket, token, logprob, flag in zip(tickets, tokens, logprobs, flags, strict=True):
            job = self._rows.live(ticket)
            if job is None:
                continue
            touched.add(job.conn)
            n += 1
            if not job.n_new:
                job.first_token = now
            if flag & (EOS | NUMERIC):
                self._last_without_token(job, flag, now)
                continue
            first = job.n_new == 0
            job.n_new += 1
            text = job.stream.push(token)
            values = [logprob] if job.logprobs else []
            if job.stream.stopped or flag & LENGTH:
                if not job.stream.stopped:
                    text += job.stream.finish()
                finish = Finish.STOP if job.stream.stopped else Finish.LENGTH
                self._last(job, finish, now, [token], text, values, None)
                continue
            job.conn.queue(
                codec.encode_tokens(job.request_id, [token], text, values, job.seed if first else None),
            )
        spent = time.perf_counter_ns() - begun
        self.counters.tokens += n
        self.counters.frames += n
        self.counters.encode_ns += spent
        return touched

    def cancel(self, job: Job, now: float) -> None:
        """Queue the last frame of a cancelled request."""
        self._last(job, Finish.CANCELLED, now, [], job.stream.finish(), [], None)

    def fail(self, job: Job, error: PeerError, now: float) -> None:
        """Queue the last frame of a request that ends with an error."""
        self._last(job, Finish.ERROR, now, [], job.stream.finish(), [], error)

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
        first_token = job.first_token or now
        seated = job.seated or now
        usage = codec.Usage(
            prompt_tokens=len(job.prompt),
            completion_tokens=job.n_new,
            constant_tokens=job.constant_tokens,
            truncated=job.truncated,
            queue_us=_us(seated - job.arrived),
            prefill_us=_us(first_token - seated),
            decode_us=_us(now - first_token),
            glue_us=job.glue_ns // 1_000,
        )
        first = job.n_new <= len(tokens)
        frame = codec.encode_last(
            job.request_id, tokens, text, logprobs, finish, usage, error, job.seed if first else None
        )
        job.conn.queue(frame)
        self.counters.finished[finish] += 1
        if self._on_last is not None:
            self._on_last(job, finish, usage, error)
        self._on_end(job)


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
