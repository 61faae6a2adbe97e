"""The access log: one line a request, finished or refused, with the figures of its `usage` and where its time went.

A frame that is no request has one too. Never the text of a prompt or an answer. The event-loop thread puts the job into
the journal's queue and is done; the line is made on the journal's thread.

State: its journal. Refuses torch, asyncio, net and gpu.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zl.errors import Code, Finish
from zl.journal import Journal, Line, utc
from zl.measures import Breakdown
from zl.rows import Job
from zl.sampling.profiles import PROFILES

if TYPE_CHECKING:
    from zl.net.messages import Request, Usage

LOST = "disconnected"
"""Outcome of a request whose peer was gone before its last frame."""


class _Ended(NamedTuple):
    time_ns: int
    at_ns: int
    job: Job


class _Refused(NamedTuple):
    time_ns: int
    connection: str
    peer: str
    request_id: int | None  # None: it was no request
    type: int | None  # None: a HELLO or CANCEL, which has no profile, or no request
    outcome: str


class Access:
    """Log the requests of a server. Raises ConfigError: the file cannot be opened."""

    def __init__(self, path: str | Path, *, max_bytes: int, keep: int):
        self.journal = Journal(path, self._lines, max_bytes=max_bytes, keep=keep, setting="access_log")

    def ended(self, job: Job, at_ns: int) -> None:
        """Take a job that has ended, at a moment of time.perf_counter_ns; nothing of it may change any more."""
        self.journal.put(_Ended(time.time_ns(), at_ns, job))

    def refused(self, conn: Any, request: Request | None, code: Code) -> None:
        """Take a request that became no job; None: a frame that is no request."""
        number = None if request is None else request.request_id
        kind = None if request is None or request.operation else request.type  # GENERATE is 0
        self.journal.put(_Refused(time.time_ns(), conn.name, conn.peer, number, kind, code.name.lower()))

    def close(self) -> None:
        """Write what waits."""
        self.journal.close()

    def _lines(self, entry: _Ended | _Refused) -> Iterator[Line]:
        if isinstance(entry, _Refused):
            yield {
                "time": utc(entry.time_ns),
                "request_id": entry.request_id,
                "connection": entry.connection,
                "peer": entry.peer,
                "type": _type_name(entry.type),
                "outcome": entry.outcome,
            }
            return
        job, usage = entry.job, entry.job.usage
        yield {
            "time": utc(entry.time_ns),
            "request_id": job.request_id,
            "connection": job.conn.name,
            "peer": job.conn.peer,
            "type": job.profile,
            "outcome": outcome_of(job),
            **_usage(usage),
            "first_token_us": max(0, round((job.first_token - job.arrived) * 1e6)) if job.first_token else None,
            "total_us": _total_ns(job, entry.at_ns) // 1_000,
            "parts_us": _parts(job),
        }


def _type_name(number: int | None) -> str | None:
    if number is None:
        return None
    return PROFILES[number].name if number in PROFILES else str(number)


def outcome_of(job: Job) -> str:
    """Name how a job has ended: its finish, the code of its error, or LOST."""
    if job.finish is Finish.NONE:
        return LOST
    return (job.error if job.finish is Finish.ERROR else job.finish).name.lower()


def _usage(usage: Usage) -> Line:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "constant_tokens": usage.constant_tokens,
        "truncated": usage.truncated,
        "queue_us": usage.queue_us,
        "prefill_us": usage.prefill_us,
        "decode_us": usage.decode_us,
        "glue_us": usage.glue_us,
    }


def _total_ns(job: Job, at_ns: int) -> int:
    if job.breakdown is not None:
        return job.breakdown.e2e
    return at_ns - job.arrived_ns + job.read_ns + job.parse_ns


def _parts(job: Job) -> Line:
    """Split the time into zl.measures.PARTS; of an answer that is not complete, into what is known of it."""
    if job.breakdown is not None:
        return {name: spent // 1_000 for name, spent in zip(Breakdown._fields[1:], job.breakdown[1:], strict=True)}
    known = {
        "frame_read": job.read_ns,
        "protobuf_parse": job.parse_ns,
        "tokenize": job.tokenize_ns,
        "schedule": job.schedule_ns,
    }
    return {name: spent // 1_000 for name, spent in known.items()}
