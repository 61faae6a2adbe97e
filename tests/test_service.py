"""zl/service.py and zl/emit.py: requests in, step results in, frames out; no socket, no engine, a clock of our own."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zl.admission import Admission, known
from zl.dispatch import Dispatcher, Limits
from zl.errors import Code, Finish, RequestError
from zl.gpu.loop import StepResult
from zl.gpu.pinned import EOS, LENGTH, NUMERIC, RowColumns
from zl.health import Health
from zl.measures import Moment
from zl.net import codec, rules
from zl.net.frames import FrameDecoder
from zl.pages import PageBooks
from zl.policy import Policy
from zl.rows import Rows
from zl.service import LONG_PROMPT_BYTES, Service
from zl.shapes import Shapes
from zl.text.outline import LITERAL, Outline, Span
from zl.text.prompt import Prompt

SHAPES = Shapes(max_rows=2, max_model_len=128, max_tokens=32, default_tokens=8)
HELLO = [b"\xe4", b"\xb8\xad", b"a", b"b", b"c", b""]  # the first two are one character in two tokens


class Conn:
    """What a connection is to the service: a queue of frames, and what it was told."""

    name = "tcp-1"
    peer = "192.0.2.7:4000"

    def __init__(self):
        self.frames: list[codec.Response] = []
        self.ended: list[int] = []
        self.flushed = 0
        self._decoder = FrameDecoder()

    def queue(self, data: bytes) -> None:
        self.frames += [codec.decode_response(event.data) for event in self._decoder.feed(data)]

    def finished(self, request_id: int) -> None:
        self.ended.append(request_id)

    def flush(self) -> None:
        self.flushed += 1

    @property
    def last(self) -> codec.Response:
        assert self.frames[-1].is_finished
        assert sum(frame.is_finished for frame in self.frames) == 1
        return self.frames[-1]


class Prompts:
    def build(self, system, messages, context, max_prompt_tokens):
        ids = list(range(len(messages[-1])))[:max_prompt_tokens]
        return Prompt(ids, 0, len(messages[-1]) > max_prompt_tokens)

    def outline(self, system, messages, context, max_prompt_tokens):
        n = min(messages[-1], max_prompt_tokens)
        spans = [Span(LITERAL, 0, 2), Span(len(messages), 0, n)]
        return Outline(np.array([1, 2], np.int32), spans, 2 + n, 0, n < messages[-1])


class Table:
    """The part of text.detok.TokenTable that a TextStream reads."""

    pieces = tuple(HELLO)
    first: dict[int, bytes] = {}
    control_ids = frozenset({5})


class Bench:
    def __init__(self, **limits):
        self.now = 100.0
        self.timers: list[tuple[float, object]] = []
        self.seated = []
        self.building = []
        self.nudges = 0
        self.rows = Rows(SHAPES.max_rows)
        self.pages = PageBooks(16)
        self.dispatcher = Dispatcher(
            SHAPES, self.rows, self.pages, RowColumns(SHAPES), lambda *s: self.seated.append(s[0]), Limits(**limits)
        )
        self.service = Service(
            admission=Admission(
                prompts=Prompts(), tokens=Table(), vocab_size=len(HELLO), policy=Policy(SHAPES),
                dispatcher=self.dispatcher,
            ),
            dispatcher=self.dispatcher, info=b"",
            call_at=lambda when, function: self.timers.append((when, function)), health=Health(time.monotonic),
            engine_nudge=self._nudge, offload=lambda work, then: self.building.append((work, then)),
            clock=lambda: self.now,
        )  # fmt: skip

    def _nudge(self):
        self.nudges += 1

    def ask(self, conn, request_id=1, text=b"hello", **fields):
        self.service.submit(conn, codec.Request(request_id=request_id, messages=[text], **fields))

    def step(self, *drawn, retired=(), first=()):
        """drawn: (ticket, token, flags)"""
        self.now += 0.01
        tickets, tokens, flags = ([d[i] for d in drawn] for i in range(3))
        self.service.on_step(
            StepResult(tickets, tokens, [-0.5] * len(drawn), flags, list(first), list(retired))
        )

    def build_prompts(self):
        for work, then in self.building:
            then(work())
        self.building.clear()

    def empty(self):
        self.dispatcher.check()
        return self.rows.in_use == self.pages.in_use == self.dispatcher.queued == self.service.in_flight == 0


def test_answer_with_length_finish_and_usage():
    bench, conn = Bench(), Conn()
    bench.ask(conn, 7, max_tokens=2, seed=9, logprobs=True)
    (ticket,) = bench.seated
    bench.step((ticket, 2, 0), first=[(ticket, 3)])
    bench.step((ticket, 3, LENGTH), retired=[ticket])
    first, last = conn.frames
    assert (first.token_ids, first.text, first.seed, first.logprobs) == ([2], b"a", 9, [-0.5])
    assert (last.token_ids, last.text, last.finish, last.seed) == ([3], b"b", Finish.LENGTH, 0)
    usage = conn.last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.constant_tokens) == (5, 2, 3)
    assert (usage.queue_us, usage.prefill_us) == (0, 10_000)
    assert 9_000 <= usage.decode_us <= 10_000
    assert conn.ended == [7]
    assert conn.flushed == 2
    assert bench.empty()


def test_end_token_is_neither_token_nor_text():
    bench, conn = Bench(), Conn()
    bench.ask(conn)
    (ticket,) = bench.seated
    bench.step((ticket, 2, 0))
    bench.step((ticket, 5, EOS), retired=[ticket])
    assert [frame.token_ids for frame in conn.frames] == [[2], []]
    assert conn.last.finish == Finish.STOP
    assert conn.last.usage.completion_tokens == 1
    assert bench.empty()


def test_answer_that_ends_at_once_still_says_its_seed():
    bench, conn = Bench(), Conn()
    bench.ask(conn, seed=77)
    bench.step((bench.seated[0], 5, EOS), retired=[bench.seated[0]])
    assert (conn.last.seed, conn.last.token_ids) == (77, [])
    assert bench.empty()


def test_character_is_never_split_across_frames():
    bench, conn = Bench(), Conn()
    bench.ask(conn, max_tokens=3)
    (ticket,) = bench.seated
    for token, flag in ((0, 0), (1, 0), (0, LENGTH)):
        bench.step((ticket, token, flag), retired=[ticket] if flag else [])
    assert [frame.text for frame in conn.frames] == [b"", "中".encode(), "\ufffd".encode()]
    assert bench.empty()


def test_stop_string_ends_the_answer_before_the_engine_knows():
    bench, conn = Bench(), Conn()
    bench.ask(conn, stop=[b"bc"])
    (ticket,) = bench.seated
    for token in (2, 3, 4):
        bench.step((ticket, token, 0))
    assert b"".join(frame.text for frame in conn.frames) == b"a"
    assert conn.last.finish == Finish.STOP
    assert bench.rows.control[ticket.row] == 1
    bench.step((ticket, 2, 0))  # a step that was in flight
    assert len(conn.frames) == 3
    bench.step(retired=[ticket])
    assert bench.empty()


def test_numeric_failure_ends_with_its_code():
    bench, conn = Bench(), Conn()
    bench.ask(conn)
    (ticket,) = bench.seated
    bench.step((ticket, -1, NUMERIC), retired=[ticket])
    assert conn.last.error.code == Code.NUMERIC
    assert conn.last.finish == Finish.ERROR
    assert bench.empty()


@pytest.mark.parametrize("seated", [True, False])
def test_cancel_is_answered_at_once_and_frees_the_row_later(seated):
    bench, conn = Bench(), Conn()
    for i in range(3):
        bench.ask(conn, i + 1)
    victim = 1 if seated else 3
    bench.service.cancel(conn, victim)
    assert (conn.frames[-1].request_id, conn.frames[-1].finish) == (victim, Finish.CANCELLED)
    assert conn.frames[-1].usage is not None
    bench.service.cancel(conn, victim)
    bench.service.cancel(conn, 999)
    assert len(conn.frames) == 1
    bench.service.closed(conn)
    for ticket in list(bench.seated):
        bench.step(retired=[ticket])
    assert bench.empty()


def test_closed_connection_gets_nothing_more():
    bench, conn = Bench(), Conn()
    for i in range(3):
        bench.ask(conn, i)
    bench.service.closed(conn)
    bench.step(*((ticket, 2, 0) for ticket in bench.seated))
    assert conn.frames == []
    bench.step(retired=list(bench.seated))
    assert bench.empty()


def test_waiting_request_is_seated_when_a_row_frees():
    bench, conn = Bench(), Conn()
    for i in range(3):
        bench.ask(conn, i)
    assert len(bench.seated) == 2
    bench.now += 0.5
    bench.step((bench.seated[0], 5, EOS), retired=[bench.seated[0]])
    assert len(bench.seated) == 3
    bench.step((bench.seated[2], 5, EOS), (bench.seated[1], 5, EOS), retired=bench.seated[1:])
    queue_us = {frame.request_id: frame.usage.queue_us for frame in conn.frames}
    assert queue_us[2] >= 500_000 > queue_us[0]
    assert bench.empty()


def test_deadline_ends_waiting_and_running_requests():
    bench, conn = Bench(), Conn()
    bench.ask(conn, 1, deadline_ms=50)
    bench.ask(conn, 2)
    bench.ask(conn, 3, deadline_ms=70)
    assert [when for when, _ in bench.timers] == [100.05, 100.07]
    bench.now = 100.06
    bench.timers[0][1]()
    assert [(f.request_id, f.error.code) for f in conn.frames] == [(1, Code.DEADLINE_EXCEEDED)]
    bench.now = 100.08
    bench.timers[1][1]()
    assert {f.request_id for f in conn.frames} == {1, 3}
    assert bench.dispatcher.queued == 0
    bench.service.closed(conn)
    bench.step(retired=list(bench.seated))
    assert bench.empty()


def test_full_house_answers_overloaded():
    bench, conn = Bench(max_queue=1), Conn()
    for i in range(3):
        bench.ask(conn, i)
    with pytest.raises(RequestError) as refusal:
        bench.ask(conn, 9)
    assert (refusal.value.code, refusal.value.request_id) == (Code.OVERLOADED, 9)
    assert refusal.value.retry_after_ms > 0
    assert bench.service.in_flight == 3


def test_draining_takes_nothing_new_and_ends_what_is_left():
    bench, conn = Bench(), Conn()
    bench.ask(conn, 1)
    bench.service.accepting = False
    with pytest.raises(RequestError) as refusal:
        bench.ask(conn, 2)
    assert refusal.value.code == Code.DRAINING
    bench.service.end_all("time is up")
    assert conn.last.error.code == Code.DRAINING
    bench.step(retired=list(bench.seated))
    assert bench.empty()


def test_dead_engine_ends_every_request_with_internal():
    bench, conn, other = Bench(), Conn(), Conn()
    bench.ask(conn, 1)
    bench.ask(other, 1)
    bench.service.engine_failed(RuntimeError("bus"))
    assert {c.last.error.code for c in (conn, other)} == {Code.INTERNAL}
    assert not bench.service.healthy


def test_bad_token_ids_are_refused_with_the_field():
    bench, conn = Bench(), Conn()
    ids = np.array([1, len(HELLO)], "<i4").tobytes()
    with pytest.raises(RequestError) as refusal:
        bench.ask(conn, 4, text=ids, encoding=codec.Encoding.TOKENS)
    assert (refusal.value.code, refusal.value.request_id) == (Code.BAD_REQUEST, 4)
    assert "messages[0]" in refusal.value.message
    assert bench.empty()


def test_empty_stop_string_leaves_no_trace():
    bench, conn = Bench(), Conn()
    with pytest.raises(RequestError):
        bench.ask(conn, stop=[b""])
    assert bench.empty()


@given(
    ids=st.lists(st.sampled_from([0, 1, 5, 6, 7, -1, 2**31 - 1, -(2**31)]), max_size=4), cut=st.integers(0, 3),
    place=st.sampled_from(["system", "context", "messages"]),
)  # fmt: skip
def test_the_quick_look_at_token_ids_agrees_with_the_one_that_names_the_culprit(ids, cut, place):
    packed = codec.pack_tokens(ids)
    packed = packed[: max(0, len(packed) - cut)]
    request = codec.decode_request(
        codec.encode_request(request_id=1, encoding=codec.Encoding.TOKENS, **{"messages": [b"\1\0\0\0"]} | {
            place: [packed] if place == "messages" else packed
        })[4:]
    )  # fmt: skip
    try:
        rules.check_tokens(request, 7)
    except RequestError:
        assert not known(request, 7)
    else:
        assert known(request, 7)


LONG = b"w" * (LONG_PROMPT_BYTES + 1)


def test_a_long_text_is_built_off_the_loop_and_then_seated():
    bench, conn = Bench(), Conn()
    bench.ask(conn, 1, text=LONG)
    bench.ask(conn, 2)
    assert len(bench.building) == 1
    assert len(bench.seated) == 1
    assert bench.service.in_flight == 2
    bench.build_prompts()
    assert len(bench.seated) == 2
    job = bench.rows.job(bench.seated[1])
    assert (job.request_id, job.truncated) == (1, True)
    assert len(job.prompt) + job.max_new <= SHAPES.max_model_len


def test_a_long_text_as_tokens_stays_on_the_loop():
    bench, conn = Bench(), Conn()
    ids = np.zeros(2_000, "<i4").tobytes()
    bench.ask(conn, 1, text=ids, encoding=codec.Encoding.TOKENS)
    assert not bench.building


@pytest.mark.parametrize("how", ["cancel", "closed", "deadline", "drain", "engine"])
def test_what_ends_while_its_prompt_is_built_is_over(how):
    bench, conn = Bench(), Conn()
    bench.ask(conn, 1, text=LONG, deadline_ms=50)
    if how == "cancel":
        bench.service.cancel(conn, 1)
        assert conn.last.finish == Finish.CANCELLED
    elif how == "closed":
        bench.service.closed(conn)
    elif how == "deadline":
        bench.now += 0.06
        for when, function in bench.timers:
            assert when <= bench.now
            function()
        assert conn.last.error.code == Code.DEADLINE_EXCEEDED
    elif how == "drain":
        bench.service.end_all("over")
        assert conn.last.error.code == Code.DRAINING
    else:
        bench.service.engine_failed(RuntimeError("bus"))
        assert conn.last.error.code == Code.INTERNAL
    n_frames = len(conn.frames)
    bench.build_prompts()
    assert len(conn.frames) == n_frames
    assert not bench.seated
    assert bench.empty()


def test_a_prompt_that_is_refused_late_ends_with_its_error():
    bench, conn = Bench(), Conn()

    def refuse(*_):
        raise RequestError(Code.LIMIT_EXCEEDED, "messages[0]: too long", field="messages[0]")

    bench.service._admission._prompts.build = refuse
    bench.ask(conn, 7, text=LONG)
    assert not conn.frames
    bench.build_prompts()
    assert conn.last.request_id == 7
    assert (conn.last.error.code, conn.last.error.message) == (Code.LIMIT_EXCEEDED, "messages[0]: too long")
    assert conn.ended == [7]
    assert bench.empty()


def test_a_fault_while_building_ends_the_request(caplog):
    bench, conn = Bench(), Conn()

    def fail(*_):
        raise KeyError("oops")

    bench.service._admission._prompts.build = fail
    bench.ask(conn, 7, text=LONG)
    bench.build_prompts()
    assert conn.last.error.code == Code.INTERNAL
    assert "building a prompt failed" in caplog.text
    assert bench.empty()


def test_prompts_that_are_built_count_as_waiting():
    bench, conn = Bench(max_queue=2), Conn()
    bench.ask(conn, 1, text=LONG)
    bench.ask(conn, 2, text=LONG)
    with pytest.raises(RequestError) as refusal:
        bench.ask(conn, 3, text=LONG)
    assert refusal.value.code == Code.OVERLOADED


def outcomes(bench):
    """Every request that was admitted, by how it ended."""
    ended = bench.service.emitter.counters
    counts = {finish.name: n for finish, n in ended.finished.items() if n and finish is not Finish.ERROR}
    counts |= {code.name: n for code, n in ended.errors.items() if n}
    gone = bench.service.counters.disconnected
    return counts | ({"disconnected": gone} if gone else {})


def test_each_request_is_counted_once_when_it_ends():
    bench, conn, gone = Bench(), Conn(), Conn()
    bench.ask(conn, 1)
    bench.ask(gone, 2)
    bench.ask(gone, 3)  # waits for a row
    assert outcomes(bench) == {}
    bench.step((bench.seated[0], 2, 0), (bench.seated[1], 2, 0))
    bench.service.cancel(conn, 1)
    bench.service.cancel(conn, 1)
    bench.step((bench.seated[0], 2, 0), (bench.seated[1], 2, 0))
    bench.service.closed(gone)
    bench.service.closed(gone)
    bench.service.closed(conn)
    bench.step(retired=bench.seated[:2])
    assert outcomes(bench) == {"CANCELLED": 1, "disconnected": 2}
    bench.ask(conn, 4)
    bench.step((bench.seated[2], 2, 0))
    bench.step((bench.seated[2], 3, NUMERIC), retired=[bench.seated[2]])
    bench.ask(conn, 5)
    bench.step((bench.seated[3], 5, EOS), retired=[bench.seated[3]])
    assert outcomes(bench) == {"CANCELLED": 1, "disconnected": 2, "NUMERIC": 1, "STOP": 1}
    assert not any(bench.service.measures.decoding.values())
    assert bench.empty()


def test_tokens_are_counted_as_sent_and_frames_as_gaps():
    bench, conn = Bench(), Conn()
    bench.ask(conn, 1, type=2)
    bench.ask(conn, 2)
    one, two = bench.seated
    bench.step((one, 2, 0), (two, 2, 0), first=[(one, 0), (two, 3)])
    bench.step((one, 3, 0), (two, 5, EOS), retired=[two])  # the end token is a frame without a token
    bench.step((one, 4, LENGTH), retired=[one])
    measures = bench.service.measures
    assert bench.service.emitter.counters.tokens == sum(len(frame.token_ids) for frame in conn.frames) == 4
    assert {name: h.count for name, h in measures.gap.items()} == {"CHAT": 1, "SUMMARIZE": 0, "CREATIVE": 2}
    assert {name: h.count for name, h in measures.e2e.items()} == {"CHAT": 1, "SUMMARIZE": 0, "CREATIVE": 1}
    assert {name: h.count for name, h in measures.first_token.items()} == {"CHAT": 1, "SUMMARIZE": 0, "CREATIVE": 1}
    assert measures.encode.count == measures.write.count == 3
    counters = bench.dispatcher.counters
    assert (counters.prompt_tokens, counters.constant_tokens) == (10, 3)


def test_glue_in_usage_is_what_the_request_and_its_steps_spent_beside_the_model():
    bench, conn = Bench(), Conn()
    request = codec.Request(request_id=1, messages=[b"hello"], max_tokens=1)
    request.read_ns, request.parse_ns = 5_000_000, 7_000_000
    bench.service.submit(conn, request)
    (ticket,) = bench.seated
    before = Moment(1, schedule=1_000_000, context_load=0, sampling=0, graph_replay=9_000_000, heartbeat=0)
    after = Moment(2, 3_000_000, context_load=4_000_000, sampling=8_000_000, graph_replay=10**9, heartbeat=10**9)
    result = StepResult([ticket], [2], [-0.5], [LENGTH], [(ticket, 0)], [ticket], before, after)
    bench.service.on_step(result)
    own_us = 5_000 + 7_000 + 2_000 + 4_000 + 8_000
    assert own_us < conn.last.usage.glue_us < own_us + 100_000  # and the making of the prompt, timed by the clock
    assert bench.empty()


def test_counting_begins_anew_when_the_server_opens():
    bench, conn = Bench(), Conn()
    bench.ask(conn, 1)
    bench.step((bench.seated[0], 5, EOS), retired=[bench.seated[0]])
    bench.service.start_counting()
    assert outcomes(bench) == {}
    assert bench.service.counters.requests == bench.dispatcher.counters.admitted == 0
    assert not any(h.count for h in bench.service.measures.queue.values())
    assert bench.empty()


def test_a_fault_in_admission_leaves_nothing_behind(monkeypatch):
    bench, conn = Bench(), Conn()
    monkeypatch.setattr(bench.dispatcher, "_notify", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.ask(conn, 1)
    assert bench.service.in_flight == 0
    bench.service.closed(conn)


def test_a_timer_that_fires_a_moment_early_does_not_lose_the_deadline():
    bench, conn = Bench(), Conn()
    bench.ask(conn, 1, deadline_ms=300)
    (when, function) = bench.timers.pop()
    bench.now = when - 0.0004
    function()
    assert bench.service.in_flight == 1
    (again, function) = bench.timers.pop()
    assert when < again <= when + 0.002
    bench.now = again
    function()
    assert conn.last.error.code is Code.DEADLINE_EXCEEDED
    assert bench.service.in_flight == 0
