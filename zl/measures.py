"""What a server measures of itself: the parts of the way, where a request's time went, latencies by profile.

State: histograms and sums that the event-loop thread adds to (`Measures`) or the engine's (`EngineTimes`); any thread
reads. All stamps are time.perf_counter_ns. Refuses torch, numpy, asyncio, net and metrics: hot paths keep these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from zl.histogram import Histogram

COMPONENTS = (
    "frame_read", "protobuf_parse", "tokenize", "context_load", "schedule", "sampling", "graph_replay", "encode",
    "write",
)  # fmt: skip
"""The parts of the way from socket to token and back."""

PARTS = ("queue", *COMPONENTS, "heartbeat", "crossing")
"""What a request's end-to-end time consists of."""

GLUE = tuple(part for part in PARTS if part not in ("queue", "graph_replay", "heartbeat"))
"""The parts that are neither waiting, nor the model's own computation, nor the check of its program."""

PROFILES = ("CHAT", "SUMMARIZE", "CREATIVE")

# Upper bounds, seconds. A microsecond is what a small part takes, a second what a full step on a small CPU takes.
PART_BUCKETS = (
    1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5,
    1.0, 2.5,
)  # fmt: skip
GAP_BUCKETS = (
    1e-3, 2e-3, 4e-3, 6e-3, 8e-3, 1e-2, 1.5e-2, 2e-2, 3e-2, 4e-2, 6e-2, 8e-2, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
WAIT_BUCKETS = (
    1e-4, 1e-3, 5e-3, 1e-2, 2e-2, 4e-2, 6e-2, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 20.0, 60.0,
)  # fmt: skip
E2E_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip

NEWEST = 64
"""Answers that the glue share looks back on."""


class Moment(NamedTuple):
    """What the engine's thread had spent at one moment, nanoseconds since its start; `at_ns` is the moment."""

    at_ns: int = 0
    schedule: int = 0
    context_load: int = 0
    sampling: int = 0
    graph_replay: int = 0
    heartbeat: int = 0


START = Moment()


class EngineTimes:
    """The engine thread's own clock: every moment of it belongs to one part, or to idling.

    One observation a step; `schedule` is planning before the launch and landing after the fence.
    """

    def __init__(self, now_ns: int):
        self.schedule = Histogram(PART_BUCKETS)
        self.context_load = Histogram(PART_BUCKETS)
        self.sampling = Histogram(PART_BUCKETS)
        self.graph_replay = Histogram(PART_BUCKETS)
        self._stamp = now_ns
        self._schedule = self._context_load = self._sampling = self._graph_replay = self._heartbeat = 0
        self._scheduled = 0  # of the step being planned or landed, before it is observed

    def idled(self, now_ns: int) -> None:
        """Give the time since the last mark to nobody."""
        self._stamp = now_ns

    def scheduled(self, now_ns: int) -> None:
        """Give the time since the last mark to planning and landing."""
        spent = now_ns - self._stamp
        self._stamp = now_ns
        self._schedule += spent
        self._scheduled += spent

    def watched(self, now_ns: int) -> None:
        """Give the time since the last mark to the check of the program."""
        self._heartbeat += now_ns - self._stamp
        self._stamp = now_ns

    def replayed(self, now_ns: int) -> None:
        """Give the time since the last mark, launching or waiting, to the step."""
        self._graph_replay += now_ns - self._stamp
        self._stamp = now_ns

    def landed(self, step_ns: int, context_load_ns: int, sampling_ns: int) -> None:
        """Book a step that has ended.

        step_ns      from launch to fence
        context_load_ns, sampling_ns   what of it the program spent there by its own clock, 0 where it keeps none
        """
        if context_load_ns:
            self.context_load.observe(context_load_ns * 1e-9)
            self._context_load += context_load_ns
        if sampling_ns:
            self.sampling.observe(sampling_ns * 1e-9)
            self._sampling += sampling_ns
        inner = context_load_ns + sampling_ns
        self._graph_replay -= inner
        self.graph_replay.observe((step_ns - inner) * 1e-9)
        self.schedule.observe(self._scheduled * 1e-9)
        self._scheduled = 0

    def landing(self, now_ns: int) -> Moment:
        """Give the time since the last mark to planning and landing, and tell what has been spent."""
        self.scheduled(now_ns)
        return self.moment()

    def moment(self) -> Moment:
        """Tell what has been spent up to the last mark."""
        return Moment(
            self._stamp, self._schedule, self._context_load, self._sampling, self._graph_replay, self._heartbeat
        )


class Timed(Protocol):
    """What Measures needs of rows.Job."""

    arrived_ns: int
    read_ns: int
    parse_ns: int
    tokenize_ns: int
    schedule_ns: int
    begun: Moment | None
    breakdown: Breakdown | None
    n_new: int

    @property
    def profile(self) -> str:
        """Name the profile."""


class Breakdown(NamedTuple):
    """Where one answer's end-to-end time went, nanoseconds. The fields after `e2e` are PARTS, disjoint and in order."""

    e2e: int
    queue: int
    frame_read: int
    protobuf_parse: int
    tokenize: int
    context_load: int
    schedule: int
    sampling: int
    graph_replay: int
    encode: int
    write: int
    heartbeat: int
    crossing: int

    @property
    def glue(self) -> int:
        """Sum the parts that are neither waiting nor the model's."""
        return sum(self[1:]) - self.queue - self.graph_replay - self.heartbeat


class Landing(NamedTuple):
    """One step result's way over the event loop, in nanoseconds; `done_ns`: when its frames had been written."""

    engine: Moment
    crossing: int
    encode: int
    schedule: int
    write: int
    done_ns: int


class Measures:
    """Latencies by profile, the parts on the event-loop thread, and the sum of all breakdowns.

    decoding  answers by profile that have had their first frame and not their last; changed by `step` and `left`
    """

    def __init__(self) -> None:
        self.tokenize = Histogram(PART_BUCKETS)
        self.schedule = Histogram(PART_BUCKETS)
        self.encode = Histogram(PART_BUCKETS)
        self.write = Histogram(PART_BUCKETS)
        self.first_token = {name: Histogram(WAIT_BUCKETS) for name in PROFILES}
        self.gap = {name: Histogram(GAP_BUCKETS) for name in PROFILES}
        self.queue = {name: Histogram(WAIT_BUCKETS) for name in PROFILES}
        self.e2e = {name: Histogram(E2E_BUCKETS) for name in PROFILES}
        self.time_ns = [0] * len(PARTS)
        self.decoding = dict.fromkeys(PROFILES, 0)
        self._newest: deque[tuple[int, int]] = deque(maxlen=NEWEST)  # (glue, e2e) of the newest answers
        self._glue = self._e2e = 0  # their sums
        self._written_ns = 0  # when the last step's frames had been written

    @property
    def glue_share(self) -> float:
        """Return the newest answers' glue as a share of their end-to-end time; 0 before the first."""
        return self._glue / self._e2e if self._e2e else 0.0

    def left(self, job: Timed) -> None:
        """Take note that an answer has ended, for whatever reason."""
        if job.n_new:
            self.decoding[job.profile] -= 1

    def step(
        self, landing: Landing, decoded: Mapping[str, int], firsts: Iterable[Timed], completed: Iterable[Timed]
    ) -> None:
        """Book a step that wrote frames.

        decoded    answers by profile that were decoding before it: each had one frame of this step
        firsts     jobs whose first frame was of it
        completed  jobs whose answer is complete with it
        """
        self.encode.observe(landing.encode * 1e-9)
        self.write.observe(landing.write * 1e-9)
        gap = (landing.done_ns - self._written_ns) * 1e-9
        self._written_ns = landing.done_ns
        for name, n_rows in decoded.items():
            if n_rows:
                self.gap[name].observe_many(gap, n_rows)
        for job in firsts:
            self.decoding[job.profile] += 1
            waited = landing.done_ns - job.arrived_ns + job.read_ns + job.parse_ns
            self.first_token[job.profile].observe(waited * 1e-9)
        for job in completed:
            self._complete(job, landing)

    def _complete(self, job: Timed, landing: Landing) -> None:
        begun, now = job.begun or landing.engine, landing.engine
        took = job.breakdown = Breakdown(
            e2e=landing.done_ns - job.arrived_ns + job.read_ns + job.parse_ns,
            queue=max(0, begun.at_ns - job.arrived_ns - job.tokenize_ns - job.schedule_ns),
            frame_read=job.read_ns,
            protobuf_parse=job.parse_ns,
            tokenize=job.tokenize_ns,
            context_load=now.context_load - begun.context_load,
            schedule=job.schedule_ns + now.schedule - begun.schedule + landing.schedule,
            sampling=now.sampling - begun.sampling,
            graph_replay=now.graph_replay - begun.graph_replay,
            encode=landing.encode,
            write=landing.write,
            heartbeat=now.heartbeat - begun.heartbeat,
            crossing=landing.crossing,
        )
        for i, spent in enumerate(took[1:]):
            self.time_ns[i] += spent
        self.queue[job.profile].observe(took.queue * 1e-9)
        self.e2e[job.profile].observe(took.e2e * 1e-9)
        glue = took.glue
        if len(self._newest) == NEWEST:
            old_glue, old_e2e = self._newest[0]
            self._glue -= old_glue
            self._e2e -= old_e2e
        self._newest.append((glue, took.e2e))
        self._glue += glue
        self._e2e += took.e2e
