"""zl/access through the service: one line a request, however it ended, with its usage's figures and never its text."""

from __future__ import annotations

import json

import pytest

from tests.test_service import Bench, Conn
from zl.access import Access
from zl.errors import Code, PeerError, RequestError
from zl.gpu.pinned import EOS, LENGTH
from zl.measures import PARTS

SECRET = b"my secret question"
USAGE = ("prompt_tokens", "completion_tokens", "constant_tokens", "truncated", "queue_us", "prefill_us", "decode_us",
         "glue_us")  # fmt: skip


@pytest.fixture
def logged(tmp_path):
    """A bench whose service has an access log, and what reads the log once it is closed."""
    bench, path = Bench(max_queue=1), tmp_path / "access"
    bench.service.access = Access(path, max_bytes=1 << 20, keep=1)

    def lines() -> list[dict]:
        bench.service.access.close()
        text = path.read_text()
        assert "secret" not in text
        return [json.loads(line) for line in text.splitlines()]

    yield bench, lines
    bench.service.access.close()


def test_a_whole_answer_has_the_figures_of_its_usage_and_all_parts(logged):
    bench, lines = logged
    conn = Conn()
    bench.ask(conn, 7, text=SECRET, max_tokens=2)
    (ticket,) = bench.seated
    bench.step((ticket, 2, 0), first=[(ticket, 3)])
    bench.step((ticket, 3, LENGTH), retired=[ticket])
    (line,) = lines()
    assert (line["request_id"], line["connection"], line["type"], line["outcome"]) == (7, "tcp-1", "CHAT", "length")
    assert {name: line[name] for name in USAGE} == {name: getattr(conn.last.usage, name) for name in USAGE}
    assert line["constant_tokens"] == 3
    assert line["first_token_us"] == pytest.approx(10_000, abs=2)
    assert tuple(line["parts_us"]) == PARTS
    assert line["total_us"] > 0


def test_every_end_has_its_outcome_and_one_line(logged):
    bench, lines = logged
    conn, lost = Conn(), Conn()
    bench.ask(conn, 1)
    bench.ask(lost, 2)
    bench.ask(conn, 3, text=SECRET)  # waits
    with pytest.raises(RequestError):
        bench.ask(conn, 4, text=SECRET)
    bench.step((bench.seated[0], 2, 0), (bench.seated[1], 2, 0))
    bench.service.closed(lost)
    bench.service.cancel(conn, 3)
    bench.step((bench.seated[0], 5, EOS), retired=list(bench.seated))
    bench.ask(conn, 5)
    bench.service.end_all("time is up")
    ended = [(line["request_id"], line["outcome"]) for line in lines()]
    assert ended == [(4, "overloaded"), (2, "disconnected"), (3, "cancelled"), (1, "stop"), (5, "draining")]
    bench.step(retired=bench.seated[2:])
    assert bench.empty()


def test_lines_of_what_did_not_end_well(logged):
    bench, lines = logged
    conn = Conn()
    bench.ask(conn, 1)
    bench.service.closed(conn)
    bench.ask(conn, 2, type=1, temperature=0.0)
    (job,) = bench.service._jobs[conn].values()
    bench.service.emitter.fail(job, PeerError(Code.DEADLINE_EXCEEDED, "late"), bench.now)
    with pytest.raises(RequestError):
        bench.ask(conn, 3, stop=[b""])
    lost, late, refused = lines()
    assert (lost["completion_tokens"], lost["first_token_us"]) == (0, None)
    assert (late["outcome"], late["type"]) == ("deadline_exceeded", "SUMMARIZE")
    assert list(late["parts_us"]) == ["frame_read", "protobuf_parse", "tokenize", "schedule"]
    assert (refused["outcome"], refused["request_id"]) == ("limit_exceeded", 3)
    assert "total_us" not in refused
