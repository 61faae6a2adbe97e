"""zl/gpu/graphs.py over a stream double that keeps CUDA's rules: what may run when, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zl.errors import InvariantError
from zl.gpu.cuda_memory import n_programs, token_buckets
from zl.gpu.graphs import Graphs, Key, PlainStream, keys
from zl.shapes import Shapes


class Captured(tuple):
    """A graph; its pool counts it while it lives."""

    def __new__(cls, stream, recorded):
        made = super().__new__(cls, recorded)
        made.users, made.pool = stream.users, stream.pool
        made.users[made.pool] = made.users.get(made.pool, 0) + 1
        return made

    def __del__(self):
        self.users[self.pool] -= 1


class Stream:
    """Work ends when somebody waits. A capture finds kernels that were never loaded, and a stream that is busy."""

    warms = True

    def __init__(self):
        self.loaded: set[object] = set()
        self.uploaded: set[int] = set()
        self.pending: list[object] = []
        self.fences: dict[int, int] = {}
        self.ended = 0
        self.given = 0
        self.capturing = False
        self.recorded: list[object] = []
        self.allocations = 0
        self.log: list[tuple[str, object]] = []
        self.pool, self.users = 1, {}

    def kernel(self, name):
        if self.capturing:
            assert name in self.loaded, f"{name} would be loaded in a capture"
            self.recorded.append(name)
        else:
            self.loaded.add(name)
            self._give(name)

    def _give(self, what):
        self.given += 1
        self.pending.append(what)

    def run(self, work):
        assert not self.capturing
        self.log.append(("run", None))
        work()

    def capture(self, work):
        assert not self.pending, "a capture began with work in flight"
        assert self.users.get(self.pool) != 0, "a pool is used again after its last graph has gone"
        self.capturing, self.recorded = True, []
        try:
            work()
        finally:
            self.capturing = False
        self.log.append(("capture", tuple(self.recorded)))
        return Captured(self, tuple(self.recorded))

    def replay(self, graph):
        if id(graph) not in self.uploaded:
            self.uploaded.add(id(graph))
            self.allocations += 1  # the first launch moves a graph to the device
        self.log.append(("replay", tuple(graph)))
        self._give(tuple(graph))

    def renew(self):
        self.pool += 1

    def mark(self, slot):
        self.fences[slot] = self.given

    def wait(self, slot):
        self._end(self.fences[slot])

    def settle(self):
        self._end(self.given)

    def _end(self, upto):
        del self.pending[: max(0, upto - self.ended)]
        self.ended = max(self.ended, upto)


def graphs(stream: Stream, wanted: list[Key]) -> Graphs:
    return Graphs(stream, wanted, lambda key: lambda: stream.kernel(key))


def test_capture_is_warmed_up_alone_on_the_stream_and_replayed_once_before_service():
    stream = Stream()
    made = graphs(stream, list(keys((512, 64, 16), 3, canary=True)))
    while made.missing:
        made.capture_next()
    assert not stream.pending
    captured = [what[0] for name, what in stream.log if name == "capture"]
    assert captured == list(keys((512, 64, 16), 3, canary=True))
    before = stream.allocations
    for key in captured:
        made.launch(key)
        stream.wait(key.slot)
    assert stream.allocations == before, "a launch after the captures allocated on the device"


@pytest.mark.parametrize(("n_slots", "canary"), [(2, False), (3, True), (1, False)])
def test_widest_bucket_is_captured_first_and_the_plan_counts_them(n_slots, canary):
    shapes = Shapes(step_tokens=512)
    listed = list(keys(token_buckets(512), n_slots, canary=canary))
    assert [key.bucket for key in listed] == sorted((key.bucket for key in listed), reverse=True)
    assert len(set(listed)) == len(listed) == n_programs(shapes, n_slots, canary=canary)
    if canary:
        assert {key.bucket for key in listed if key.slot == n_slots - 1} == {16}


def test_a_program_that_is_not_there_is_refused_and_uncaptured_work_still_runs():
    stream = Stream()
    made = graphs(stream, [Key(0, 16, True)])
    made.capture_next()
    with pytest.raises(InvariantError, match="bucket=64"):
        made.launch(Key(0, 64, True))
    made.launch_uncaptured(Key(0, 64, True))
    assert stream.pending == [Key(0, 64, True)]
    stream.wait(0)
    made.drop()
    assert not any(stream.users.values()), "a graph outlives the drop"
    assert made.missing == 1
    made.capture_next()
    made.drop()
    with pytest.raises(InvariantError):
        made.launch(Key(0, 16, True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from(["launch", "uncaptured", "wait"]))))
def test_a_slots_fence_is_behind_its_own_step_and_all_before_it(actions):
    stream = Stream()
    made = graphs(stream, [Key(slot, 16, mixed) for slot in range(3) for mixed in (True, False)])
    while made.missing:
        made.capture_next()
    launched: list[tuple[int, int]] = []
    for slot, mixed, what in actions:
        key = Key(slot, 16, mixed)
        if what == "wait":
            if slot in stream.fences:
                stream.wait(slot)
                newest = max(number for s, number in launched if s == slot)
                assert stream.ended >= newest
            continue
        (made.launch if what == "launch" else made.launch_uncaptured)(key)
        launched.append((slot, stream.given))


def test_the_plain_streams_graph_is_the_work_itself():
    seen = []
    made = Graphs(PlainStream(), [Key(0, 16, False)], lambda key: lambda: seen.append(key))
    made.capture_next()
    seen.clear()
    made.launch(Key(0, 16, False))
    made.launch_uncaptured(Key(1, 64, True))
    assert seen == [Key(0, 16, False), Key(1, 64, True)]
