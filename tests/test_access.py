"""zl/access through the service: one line a request, however it ended, with its usage's figures and never its text."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from tests.test_service import Bench, Conn
from zl.access import Access
from zl.errors import Code, PeerError, RequestError
from zl.gpu.arena import Arena
from zl.gpu.pinned import EOS, LENGTH
from zl.measures import PARTS
from zl.net import codec
from zl.net.connections import Net
from zl.net.frames import frame

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


@contextlib.asynccontextmanager
async def connected(service, auth_token=None):
    """A peer of the service over a real socket; at the end, the service has seen it go."""
    loop = asyncio.get_running_loop()
    with contextlib.closing(Arena(1)) as arena:
        net = Net(loop=loop, app=service, arena=arena, auth_token=auth_token)
        listening = await loop.create_server(net.connection, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        yield net, reader, writer
        writer.close()
        await writer.wait_closed()
        listening.close()
        while net.connections:
            await asyncio.sleep(0.001)
        net.close()


def test_every_refused_request_has_one_line_whoever_refused_it(logged):
    bench, lines = logged

    def ask(request_id, **fields):
        return codec.encode_request(**{"request_id": request_id, "messages": [SECRET], **fields})

    peers: list[str] = []

    async def main() -> None:
        async with connected(bench.service) as (net, reader, writer):
            peers.append("{}:{}".format(*writer.get_extra_info("sockname")))
            writer.write(ask(1, type=2) + ask(1))
            writer.write(ask(2, temperature=1_000.0, type=9) + ask(3, stop=[b"x"] * 5))
            writer.write(ask(4) + ask(5) + ask(6))  # one more than the rows and places that there are
            while sum(net.counters.errors.values()) < 4:
                await asyncio.sleep(0.001)
            bench.service.accepting = False
            writer.write(ask(7) + frame(b"\x00\x01"))
            await reader.read()  # to its end
        async with connected(bench.service, b"the secret") as (_, reader, writer):
            peers.append("{}:{}".format(*writer.get_extra_info("sockname")))
            writer.write(ask(8, operation=codec.Operation.HELLO, auth_token=b"another secret", messages=[]))
            await reader.read()

    asyncio.run(asyncio.wait_for(main(), 30))
    logged_lines = lines()
    assert [(line["request_id"], line["type"], line["outcome"]) for line in logged_lines] == [
        (1, "CHAT", "duplicate_id"),
        (2, "9", "bad_request"),
        (3, "CHAT", "limit_exceeded"),
        (6, "CHAT", "overloaded"),
        (7, "CHAT", "draining"),
        (None, None, "bad_frame"),  # which ends those that run
        (1, "CREATIVE", "disconnected"),
        (4, "CHAT", "disconnected"),
        (5, "CHAT", "disconnected"),
        (8, None, "unauthenticated"),
    ]
    assert {line["connection"] for line in logged_lines} == {"tcp-1"}
    assert {line["peer"] for line in logged_lines} == set(peers)
    assert all(("total_us" in line) == (line["outcome"] == "disconnected") for line in logged_lines)


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
