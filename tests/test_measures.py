"""zl/measures.py: the engine's clock, where an answer's time went, latencies by profile; stamps of our own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zl.measures import NEWEST, PARTS, Breakdown, EngineTimes, Landing, Measures, Moment

MS = 1_000_000


@dataclass
class Job:
    arrived_ns: int = 0
    read_ns: int = 0
    parse_ns: int = 0
    tokenize_ns: int = 0
    schedule_ns: int = 0
    begun: Moment | None = None
    breakdown: Breakdown | None = None
    n_new: int = 0
    profile: str = "CHAT"


def landing(engine, done_ns, *, crossing=0, encode=0, schedule=0, write=0):
    return Landing(engine, crossing, encode, schedule, write, done_ns)


def test_engine_clock_gives_each_stretch_to_its_part():
    times = EngineTimes(0)
    times.scheduled(2 * MS)
    times.watched(3 * MS)
    times.scheduled(4 * MS)  # launch
    times.replayed(5 * MS)
    times.scheduled(6 * MS)
    times.replayed(16 * MS)  # fence
    times.landed(12 * MS, 1 * MS, 2 * MS)
    assert times.landing(17 * MS) == Moment(
        17 * MS, schedule=5 * MS, context_load=1 * MS, sampling=2 * MS, graph_replay=8 * MS, heartbeat=1 * MS
    )
    assert times.graph_replay.total == pytest.approx(0.009)  # launch to fence less what has a name of its own
    assert times.schedule.total == pytest.approx(0.004)  # what came before it landed; the rest is the next step's
    times.idled(50 * MS)
    times.landed(0, 0, 0)
    assert times.context_load.count == 1, "a program without inner clock has no observations there"
    assert times.moment().at_ns == 50 * MS
    assert sum(times.moment()[1:]) == 17 * MS, "nobody idles on a request's account"


def test_breakdown_adds_up_to_end_to_end():
    measures = Measures()
    begun = Moment(at_ns=130 * MS, schedule=7 * MS, context_load=0, sampling=0, graph_replay=90 * MS, heartbeat=MS)
    job = Job(
        arrived_ns=100 * MS, read_ns=1 * MS, parse_ns=2 * MS, tokenize_ns=5 * MS, schedule_ns=3 * MS, begun=begun
    )
    landed = Moment(230 * MS, 17 * MS, 4 * MS, 6 * MS, 160 * MS, 11 * MS)
    step = landing(landed, 242 * MS, crossing=1 * MS, encode=5 * MS, schedule=2 * MS, write=4 * MS)
    measures.step(step, {}, [job], [job])
    took = job.breakdown
    assert took.e2e == 145 * MS == sum(took[1:])
    assert took.queue == 22 * MS
    assert took.schedule == (3 + 10 + 2) * MS
    assert took.graph_replay == 70 * MS
    assert took.glue == took.e2e - (22 + 70 + 10) * MS
    assert measures.glue_share == pytest.approx(43 / 145)
    assert dict(zip(PARTS, measures.time_ns, strict=True))["heartbeat"] == 10 * MS
    assert measures.e2e["CHAT"].total == measures.first_token["CHAT"].total == pytest.approx(0.145)
    assert measures.queue["CHAT"].total == pytest.approx(0.022)


def test_breakdown_fields_are_the_parts_in_order():
    assert Breakdown._fields == ("e2e", *PARTS)


def test_gaps_are_one_a_frame_but_the_first_by_profile():
    measures = Measures()
    chat, creative = Job(), Job(profile="CREATIVE")
    at = Moment()
    measures.step(landing(at, 10 * MS), dict(measures.decoding), [chat], [])
    chat.n_new = 1
    measures.step(landing(at, 30 * MS), dict(measures.decoding), [creative], [])
    creative.n_new = 1
    before = dict(measures.decoding)
    measures.left(chat)
    measures.step(landing(at, 60 * MS), before, [], [])
    measures.step(landing(at, 70 * MS), dict(measures.decoding), [], [])
    assert (measures.gap["CHAT"].count, measures.gap["CHAT"].total) == (2, pytest.approx(0.050))
    assert (measures.gap["CREATIVE"].count, measures.gap["CREATIVE"].total) == (2, pytest.approx(0.040))
    measures.left(creative)
    assert not any(measures.decoding.values())


def test_an_answer_that_ends_before_its_first_token_was_never_decoding():
    measures = Measures()
    measures.left(Job())
    assert not any(measures.decoding.values())


def test_glue_share_looks_back_on_the_newest_answers():
    measures = Measures()
    for _ in range(NEWEST):  # all replay, no glue
        measures.step(landing(Moment(10 * MS, graph_replay=10 * MS), 10 * MS), {}, [], [Job(begun=Moment())])
    assert measures.glue_share == 0
    for n in range(1, NEWEST + 1):  # all glue
        measures.step(landing(Moment(10 * MS, schedule=10 * MS), 10 * MS), {}, [], [Job(begun=Moment())])
        assert measures.glue_share == pytest.approx(n / NEWEST)
    measures.step(landing(Moment(10 * MS, schedule=10 * MS), 10 * MS), {}, [], [Job(begun=Moment())])
    assert measures.glue_share == 1
