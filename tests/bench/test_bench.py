"""The arithmetic of bench/: figures from traces, order, ratios, reports. Nothing here measures time."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from bench import report, serve
from bench.clients import FrameClient, FrameConnection, SseClient, SseConnection
from bench.drivers import driver, known
from bench.drivers.base import HOST, MissingPeerError, Plan, python_of
from bench.drivers.zl import METRICS_HOST
from bench.micro import buckets
from bench.scenarios import SCENARIOS, SETTLED_FRAMES, Size, arrivals, burst
from bench.stats import alternating, gap_stretch, ratios
from zl.net import codec, rules
from zl.tools import prompts
from zl.tools.traces import Trace, describe, percentile, poisson_times, summarise


def test_percentile_agrees_with_numpy():
    rng = random.Random(1)
    for n in (1, 2, 3, 10, 101):
        values = [rng.random() for _ in range(n)]
        for q in (0, 1, 50, 90, 99, 100):
            assert percentile(values, q) == pytest.approx(np.percentile(values, q))
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_describe_of_known_values():
    figures = describe([1.0, 2.0, 3.0, 4.0])
    assert figures["mean"] == 2.5
    assert figures["sd"] == pytest.approx(statistics.pstdev([1, 2, 3, 4]))
    assert (figures["min"], figures["max"], figures["n"]) == (1.0, 4.0, 4.0)
    assert describe([]) == {}


def test_summary_counts_prefill_tokens_and_shared_frames():
    a = Trace(sent=10.0, arrivals=[11.0, 11.5, 12.0], n_tokens=4, prompt_tokens=7, usage={"glue_us": 5})
    b = Trace(sent=10.5, arrivals=[11.0, 13.0], n_tokens=2, prompt_tokens=9, usage={"glue_us": 7})
    bad = Trace(sent=9.0, error="refused")
    figures = summarise([a, b, bad])
    assert figures["seconds"] == 3.0  # from the first good request sent to the last token
    assert figures["tokens_per_s"] == 2.0
    assert (figures["requests"], figures["failed"], figures["errors"]) == (3, 1, ["refused"])
    assert figures["first_s"]["mean"] == 0.75
    assert sorted([0.5, 0.5, 2.0])[1] == figures["gap_s"]["p50"]
    assert figures["per_token_s"]["max"] == 2.0
    assert figures["per_token_s"]["min"] == pytest.approx(1 / 3)
    assert (figures["frames"], figures["prompt_tokens"], figures["usage"]) == (5, 16, {"glue_us": 12})
    assert len(figures["first_curve_s"]) == len(figures["gap_curve_s"]) == 101
    assert figures["gap_curve_s"][0] == 0.5
    assert figures["gap_curve_s"][100] == 2.0


def test_a_round_in_which_everything_failed_is_no_round():
    with pytest.raises(ValueError, match="all 1 requests failed; the first: no such model"):
        summarise([Trace(error="no such model")])


def test_order_alternates():
    assert alternating(["a", "b"], 3) == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_ratios_pair_rounds_so_that_drift_cancels():
    # The machine halves its speed in the second round: each round says 2, medians of either side would not matter.
    got = ratios([100.0, 50.0, 98.0], [50.0, 25.0, 49.0])
    assert (got["median"], got["min"], got["max"]) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="the same number"):
        ratios([1.0], [1.0, 2.0])


def test_poisson_times_scale_with_the_rate_and_have_the_right_mean():
    slow, fast = poisson_times(4_000, 2.0, seed=3), poisson_times(4_000, 8.0, seed=3)
    assert all(a == pytest.approx(4 * b) for a, b in zip(slow, fast, strict=True))
    assert slow == sorted(slow)
    gaps = np.diff([0.0, *slow])
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() == pytest.approx(0.5, rel=0.08)  # exponential: the deviation equals the mean
    assert poisson_times(5, 1.0, seed=3) != poisson_times(5, 1.0, seed=4)


def test_stretch_is_largest_gap_over_median_and_can_begin_late():
    early = Trace(arrivals=[0.0, 9.0, 10.0, 11.0, 12.0, 14.0])
    assert gap_stretch([early]) == [9.0]
    assert gap_stretch([early], since=10.5) == [2.0]
    assert gap_stretch([Trace(arrivals=[1.0])]) == []


def test_prompts_come_from_the_seed_and_differ_between_streams_and_rounds():
    one, again, other = (prompts.burst(8, 4, seed) for seed in (1, 1, 2))
    assert one == again
    texts = {p.messages[0] for p in one + other}
    assert len(texts) == 16
    assert all(len(t.split()) == 60 for t in texts)
    first, second = prompts.shared(2, 4, 1), prompts.shared(2, 4, 2)
    assert len({p.system for p in first + second}) == 1
    assert len(first[0].system.split()) == 400


def test_words_are_single_tokens_of_the_embedded_model(gguf_path):
    from zl.gpu.weights import open_model
    from zl.text.tokenizer import text_model

    tokenizer = text_model(open_model(gguf_path)).tokenizer
    many = [w for w in prompts.WORDS if len(tokenizer.encode(" " + w, add_special_tokens=False).ids) != 1]
    assert many == []


def test_mixed_prompts_keep_their_own_lengths_and_wrap_around():
    path = serve.ROOT / "tests/data/chat.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    made = prompts.mixed(path, len(records) + 2)
    assert [p.max_tokens for p in made[: len(records)]] == [r["max_tokens"] for r in records]
    assert made[len(records)] == made[0]
    assert {p.type for p in made} <= set(prompts.PROFILES)
    roles = [turn["role"] for turn in made[0].chat()]
    assert roles[-1] == "user"


class _Wire:
    """A transport that keeps what is written."""

    def __init__(self):
        self.written = b""

    def write(self, data):
        self.written += data

    def is_closing(self):
        return False


def _drive(connection, request: bytes, answer: bytes, cut: int) -> Trace:
    async def go():
        connection.connection_made(_Wire())
        asked = asyncio.ensure_future(connection.ask(request))
        await asyncio.sleep(0)
        for i in range(0, len(answer), cut):
            connection.data_received(answer[i : i + cut])
        return await asyncio.wait_for(asked, 5)

    return asyncio.run(go())


def _chunked(*events: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


VLLM_LIKE = _chunked(
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\ndata: {"choices":[{"delta":{"content":""}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"lo"},"finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":11,"total_tokens":15,"completion_tokens":4}}\n\n',
    b"data: [DONE]\n\n",
)


@pytest.mark.parametrize("cut", [1, 7, 64, 10_000])
def test_event_stream_is_counted_the_same_in_any_cuts(cut):
    trace = _drive(SseConnection(), b"", VLLM_LIKE, cut)
    assert trace.error == ""
    assert len(trace.arrivals) == 3  # not the role, not the usage
    assert (trace.n_tokens, trace.prompt_tokens) == (4, 11)  # the server's own count wins


def test_event_stream_without_usage_counts_its_events():
    events = [b'data: {"choices": [{"delta": {"content": "a"}}]}\r\n\r\n'] * 3
    trace = _drive(SseConnection(), b"", _chunked(*events, b"data: [DONE]\r\n\r\n"), 9)
    assert (trace.n_tokens, trace.error) == (3, "")


def test_http_error_and_cut_stream_are_errors():
    refused = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 11\r\n\r\nno such model"
    assert "400" in _drive(SseConnection(), b"", refused, 5).error
    ended = _drive(SseConnection(), b"", _chunked(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'), 50)
    assert "before [DONE]" in ended.error


@pytest.mark.parametrize("cut", [1, 5, 10_000])
def test_frames_are_counted_the_same_in_any_cuts(cut):
    usage = codec.Usage(prompt_tokens=9, completion_tokens=3, constant_tokens=0, glue_us=2)
    answer = codec.encode_tokens(1, [5, 6], b"ab", [], None)
    answer += codec.encode_last(1, [7], b"c", None, codec.Finish.LENGTH, usage)
    trace = _drive(FrameConnection(), b"", answer, cut)
    assert (trace.n_tokens, len(trace.arrivals), trace.prompt_tokens, trace.error) == (3, 2, 9, "")
    assert trace.usage["glue_us"] == 2


def test_both_clients_send_the_same_conversation():
    prompt = prompts.Prompt("Be brief.", ("One?", "One.", "Two?"), 32, "SUMMARIZE")
    frame = FrameClient(HOST, 1).encode(prompt)
    request = codec.decode_request(frame[4:])
    rules.check_request(request)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    sse = SseClient(HOST, 1, "m", "repetition_penalty", {"ignore_eos": True}).encode(prompt)
    body = json.loads(sse.partition(b"\r\n\r\n")[2])
    contents = [turn["content"].encode() for turn in body["messages"]]
    assert contents == [request.system, *request.messages]
    assert body["max_tokens"] == request.max_tokens == 32
    assert (body["temperature"], body["top_p"], body["repetition_penalty"]) == (0.3, 0.5, 1.0)
    assert request.ignore_eos
    assert body["ignore_eos"]


def test_profiles_are_those_of_the_server():
    from zl.sampling import profiles

    for number, name in enumerate(("CHAT", "SUMMARIZE", "CREATIVE")):
        ours = profiles.PROFILES[number]
        assert prompts.PROFILES[name] == (ours.temperature, ours.top_p, ours.penalty)


class _Fake:
    """A client that answers at once and counts how many answers run at a time."""

    def __init__(self):
        self.open = self.now = self.most = 0
        self.asked = []

    async def connect(self, n):
        self.open = max(self.open, n)

    async def ask(self, prompt, stream):
        assert stream < self.open
        self.asked.append((stream, prompt))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return Trace(sent=0.0, arrivals=[1.0], n_tokens=1)


def test_burst_keeps_each_stream_busy_and_asks_everything_once():
    client, asked = _Fake(), prompts.burst(12, 4, 1)
    traces = asyncio.run(burst(client, asked, 4))
    assert len(traces) == 12
    assert client.most == 4
    assert sorted(p.messages for _, p in client.asked) == sorted(p.messages for p in asked)


def test_arrivals_wait_for_their_time_and_use_a_connection_each(monkeypatch):
    waited = []

    async def sleep(seconds, yielding=asyncio.sleep):
        waited.append(seconds)
        await yielding(0)

    monkeypatch.setattr("bench.scenarios.clock", lambda: 100.0)
    client, asked = _Fake(), prompts.burst(3, 4, 1)
    monkeypatch.setattr("bench.scenarios.asyncio.sleep", sleep)
    traces = asyncio.run(arrivals(client, asked, [0.5, 0.0, 7.25]))
    assert len(traces) == 3
    assert waited[:3] == [0.5, 0.0, 7.25]
    assert sorted(stream for stream, _ in client.asked) == [0, 1, 2]
    assert client.open == 3


def test_poisson_without_a_rate_says_what_to_do():
    size = Size(streams=1, tokens=1, per_stream=1, idle=0, arrivals_s=1.0, prompts=Path())
    with pytest.raises(ValueError, match="measure capacity first"):
        asyncio.run(SCENARIOS["poisson"].run(_Fake(), size, 1))


def test_every_system_has_a_driver_and_absent_peers_are_said(tmp_path, monkeypatch):
    assert known() == ["zl", "vllm", "llamacpp", "llamacpp-server", "transformers", "transformers-cb"]
    assert [driver(name).name for name in known()] == known()
    with pytest.raises(ValueError, match="no system is called 'other'"):
        driver("other")
    monkeypatch.setattr("bench.drivers.base.ROOT", tmp_path)
    with pytest.raises(MissingPeerError, match="make bench-peers"):
        python_of(".venv-vllm")


def test_zl_is_measured_with_default_settings():
    plan = Plan(Path("m.gguf"), Path("m"), streams=8, row_tokens=100, threads=2)
    argv, env = driver("zl").command(plan, 7999)
    assert argv[1:6] == ["-m", "zl", "serve", "--model", "m.gguf"]
    assert argv[6:] == ["--listen", "tcp:127.0.0.1:7999", "--metrics", "127.0.0.2:7999"]
    assert "OMP_NUM_THREADS" not in env


def test_zl_says_how_many_steps_its_program_did_not_compute():
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b"# TYPE zl_steps counter\nzl_steps_total 400\n"
            body += b"# TYPE zl_fallback_steps counter\nzl_fallback_steps_total 3\n"
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer((METRICS_HOST, 0), Page) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        assert driver("zl").counts(server.server_port) == {"steps": 400.0, "fallback_steps": 3.0}
        thread.join()
    assert [driver(name).counts(1) for name in known()[1:]] == [{}] * (len(known()) - 1)


def test_sizes_default_to_the_scenario_and_give_way_to_flags():
    p = serve.parser()
    size = serve.size_of(p.parse_args([]), "full")
    assert (size.streams, size.tokens, size.per_stream, size.idle) == (128, 64, 1, 0)
    size = serve.size_of(p.parse_args(["--streams", "3", "--tokens", "5", "--idle", "70"]), "idle")
    assert (size.streams, size.tokens, size.idle) == (3, 5, 70)


@pytest.fixture
def result() -> dict:
    """A stored result: the machine slows down by two in round 1."""

    def entry(number, system, speed, first, resident):
        trace = Trace(sent=0.0, arrivals=[first, first + 0.01, first + 0.03], n_tokens=3)
        figures = summarise([trace, trace]) | {"tokens_per_s": speed, "cpu_s": 0.6, "rss_peak_bytes": resident << 20}
        return {"round": number, "system": system, "pss_bytes": resident << 20, "client_cpu_s": 0.1, **figures}

    measured = {"gemm_bfloat16_flop_per_s": 1.5e12, "read_1GiB_bytes_per_s": 2e10}
    return {
        "scenario": "full",
        "commit": "0123456789abcdef",
        "uncommitted_changes": False,
        "date": "2026-11-29T00:00:00+00:00",
        "machine": {"processor": "a processor", "cores": 2, "measured": measured},
        "settings": {"streams": 2, "tokens": 3, "rounds": 3, "model": "m.gguf"},
        "order": ["zl", "vllm"],
        "systems": {"zl": {"startup_s": [2.0]}, "vllm": {"startup_s": [80.0, 90.0, 100.0]}},
        "rounds": [
            entry(0, "zl", 2_000.0, 0.1, 1_000),
            entry(0, "vllm", 200.0, 0.8, 4_000),
            entry(1, "zl", 1_000.0, 0.2, 1_000),
            entry(1, "vllm", 100.0, 1.0, 4_000),
            entry(2, "zl", 2_400.0, 0.1, 1_000),
            entry(2, "vllm", 200.0, 0.6, 4_000),
        ],
    }


def test_table_has_medians_and_paired_ratios(result):
    lines = {line.split(" | ")[0].strip("| "): line for line in report.table(result).splitlines() if line[:1] == "|"}
    assert lines["tokens/s"] == "| tokens/s | 2000.0 | 200.0 | 10.00 (10.00 to 12.00) |"
    assert lines["first token, mean, ms"] == "| first token, mean, ms | 100.0 | 800.0 | 6.00 (5.00 to 8.00) |"
    assert lines["peak resident, MiB"] == "| peak resident, MiB | 1000 | 4000 | 4.00 (4.00 to 4.00) |"
    assert lines["CPU, ms a token"].startswith("| CPU, ms a token | 100.00 | 100.00 | 1.00")
    assert lines["start to first token, s"] == "| start to first token, s | 2.0 | 90.0 | 45.00 |"
    assert "arrivals a second" not in lines  # a figure that the scenario does not have takes no line


def test_table_says_which_share_of_the_steps_the_program_computed(result):
    assert "steps replayed" not in report.table(result)
    for entry in result["rounds"]:
        entry |= {"steps": 400.0, "fallback_steps": 3.0} if entry["system"] == "zl" else {}
    assert "| steps replayed by the program | 99.25% |" in report.table(result)


def test_padding_is_told_by_tile_and_bucket():
    assert [buckets.padded(n) for n in (1, 16, 17, 64, 65, 256)] == [
        (16, 16), (16, 16), (32, 64), (64, 64), (80, 256), (256, 256),
    ]  # fmt: skip
    lines = buckets.table({17: 1_000.0, 32: 1_100.0, 64: 2_000.0})
    assert lines[2] == "| 17 | 1.00 | 32: +10% | 64: +100% |"
    assert lines[3:] == ["| 32 | 1.10 | – | 64: +82% |", "| 64 | 2.00 | – | – |"]


def test_report_writes_table_beside_the_result_and_leaves_it_alone(result, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result))
    before = path.read_bytes()
    written = report.write(path)
    assert path.read_bytes() == before
    assert written[:2] == [path, tmp_path / "r.md"]
    assert (tmp_path / "r.md").read_text() == report.table(result)


def test_report_draws_a_plot(result, tmp_path):
    pytest.importorskip("matplotlib", reason="plots are optional")
    report.plot(result, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_failed_requests_are_told_under_the_table(result):
    assert "Failed" not in report.table(result)
    result["rounds"][1]["failed"] = 2
    assert "Failed requests: vllm 2" in report.table(result)


class Stepwise:
    """A client whose streams get a frame a millisecond; what it had of an answer stays until the next is asked for."""

    def __init__(self):
        self.traces: dict[int, Trace] = {}
        self.when_long: list[int] = []

    async def connect(self, n: int) -> None:
        for i in range(n):
            self.traces.setdefault(i, Trace())

    def progress(self, stream: int) -> int:
        return len(self.traces[stream].arrivals)

    async def ask(self, prompt, stream: int) -> Trace:
        trace = self.traces[stream] = Trace(sent=time.perf_counter())
        if len(prompt.messages[0].split()) > 1_000:
            self.when_long = [self.progress(i) for i in range(stream)]
        for _ in range(prompt.max_tokens):
            await asyncio.sleep(0.001)
            trace.arrivals.append(time.perf_counter())
        return trace


def test_the_long_prompt_comes_when_this_rounds_streams_run():
    async def rounds():
        client = Stepwise()
        size = serve.size_of(serve.parser().parse_args(["--streams", "3", "--tokens", "40"]), "long")
        for number in range(2):
            await SCENARIOS["long"].run(client, size, number)
            assert all(SETTLED_FRAMES <= n < 40 for n in client.when_long), client.when_long

    asyncio.run(rounds())
