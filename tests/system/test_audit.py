"""Audit on a real server: every span that a regular-expression pass finds, with its tokens, and no other text."""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import ServerProcess, serving
from zl.audit import DEFAULT_PATTERNS
from zl.client import Client
from zl.text.detok import TokenTable
from zl.text.tokenizer import text_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

PROMPTS = [
    "Write an invoice with five items, each with its price in dollars, and the total. Put the date at the top.",
    "List five important dates of the Second World War, with day, month and year.",
    "Make a budget for a holiday of one week: flights, hotel, food. Give every amount in euros and its percentage.",
    "Invent a bank statement with dates in the form 2024-03-05, amounts such as $1,250.00 and the balance after each.",
]
EVIL = r"(\w+\s?)+\x00"
PATTERNS = {**DEFAULT_PATTERNS, "number": r"\d+"}


class Audited:
    """A server with both its audit log and what clients were sent."""

    def __init__(self, server: ServerProcess, path: Path, access: Path):
        self.server, self.path, self.access = server, path, access

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def settled(self, request_ids: set[int]) -> list[dict]:
        """Wait until the log says something about each request and has stopped growing; return these lines."""
        deadline, before = time.monotonic() + 30, -1
        while time.monotonic() < deadline:
            lines = [line for line in self.lines() if line["request_id"] in request_ids]
            if {line["request_id"] for line in lines} == request_ids and len(lines) == before:
                return lines
            before = len(lines)
            time.sleep(0.3)
        raise AssertionError(f"nothing about {request_ids} after 30 s: {self.lines()}")


@pytest.fixture(scope="module")
def audited(tmp_path_factory, gguf_path) -> Iterator[Audited]:
    folder = tmp_path_factory.mktemp("audit")
    path, access = folder / "audit.jsonl", folder / "access.jsonl"
    env = {"ZL_AUDIT_PATTERNS": json.dumps({"number": PATTERNS["number"]})}
    flags = ("--model", str(gguf_path), "--audit-log", str(path), "--access-log", str(access))
    for server in serving(folder, *flags, env=env):
        yield Audited(server, path, access)


@pytest.fixture(scope="module")
def table(gguf_path) -> TokenTable:
    from zl.gpu.weights import open_model

    return TokenTable(text_model(open_model(gguf_path)))


def ask_all(address: str, **more) -> list:
    with Client(address, timeout=200) as client:
        streams = [
            client.stream(prompt, seed=n, type="summarize", max_tokens=160, logprobs=n % 2 == 0, **more)
            for n, prompt in enumerate(PROMPTS)
        ]
        chunks = [list(stream) for stream in streams]
        return [
            (
                "".join(c.text for c in parts),
                [t for c in parts for t in c.token_ids],
                [p for c in parts for p in c.logprobs],
            )
            for parts in chunks
        ]


@pytest.fixture(scope="module")
def answers(audited) -> list:
    return ask_all(audited.server.unix)


def test_recall_is_whole_tokens_are_exact_and_no_other_text_is_in_the_log(audited, answers, table):
    lines = audited.settled({1, 2, 3, 4})
    by_request = {number: [line for line in lines if line["request_id"] == number] for number in range(1, 5)}
    n_spans = 0
    for number, (text, tokens, logprobs) in enumerate(answers, 1):
        wanted = [(name, m.group()) for name, p in PATTERNS.items() for m in re.finditer(p, text) if m.group()]
        found = [(line["name"], line["span"]) for line in by_request[number]]
        assert found == wanted
        n_spans += len(found)
        ends = list(itertools.accumulate(len(table.pieces[token]) for token in tokens))
        assert table.text_of(tokens).decode() == text
        spans = iter(by_request[number])
        for name, pattern in PATTERNS.items():
            for match in re.finditer(pattern, text):
                line = next(spans)
                low, high = (len(text[:edge].encode()) for edge in match.span())
                mine = [i for i, end in enumerate(ends) if end > low and end - len(table.pieces[tokens[i]]) < high]
                assert (line["name"], line["token_index"]) == (name, mine[0])
                assert line["token_ids"] == [tokens[i] for i in mine]
                assert all(value < 0 for value in line["logprobs"])
                if logprobs:
                    assert line["logprobs"] == [logprobs[i] for i in mine]
        assert {line["seed"] for line in by_request[number]} <= {number - 1}
    kinds = {line["name"] for line in lines}
    assert {"amount", "date"} <= kinds, kinds
    assert n_spans > 30
    # What is in the log of the texts is the spans; no word that is in none of them.
    spoken = {word for text, _, _ in answers for word in re.findall(r"[^\W\d_]{4,}", text)}
    in_spans = " ".join(line["span"] for line in lines)
    logged = audited.path.read_text()
    fields = "time request_id connection build_id seed name span token_index token_ids logprobs amount date number"
    strange = {w for w in spoken if w in logged and w not in in_spans and w not in fields and w not in "percentage"}
    assert not strange


def test_the_access_log_has_a_line_a_request_with_its_times_and_no_text(audited, answers):
    lines = [json.loads(line) for line in audited.access.read_text().splitlines()][: len(PROMPTS)]
    assert sorted(line["request_id"] for line in lines) == [1, 2, 3, 4]
    for line in lines:
        _, tokens, _ = answers[line["request_id"] - 1]
        assert (line["outcome"], line["type"]) == ("length" if len(tokens) == 160 else "stop", "SUMMARIZE")
        assert line["completion_tokens"] == len(tokens)
        assert line["connection"].startswith("unix-")
        assert 0 < line["first_token_us"] < line["total_us"]
        assert sum(line["parts_us"].values()) == pytest.approx(line["total_us"], rel=0.1)
        assert line["parts_us"]["graph_replay"] > 0.5 * line["total_us"]
    logged = audited.access.read_text()
    words = {word for prompt in PROMPTS for word in re.findall(r"[A-Za-z]{5,}", prompt)} - {"total"}  # total_us
    assert not [word for word in words if word in logged]


def test_the_wire_is_the_same_with_and_without(answers, default_server):
    assert ask_all(default_server.unix) == answers


def test_what_was_cut_by_a_cancel_or_a_lost_peer_is_audited_too(audited):
    before = len(audited.lines())
    client = Client(audited.server.unix, timeout=60)
    stream = client.stream("Count from 1 to 100 in digits.", seed=1, type="summarize", ignore_eos=True, max_tokens=400)
    seen = ""
    for chunk in stream:
        seen += chunk.text
        if len(re.findall(r"\d+", seen)) > 3:
            break
    client.close()
    deadline = time.monotonic() + 20
    while len(audited.lines()) < before + 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    spans = [line["span"] for line in audited.lines()[before:] if line["name"] == "number"]
    assert spans[:3] == re.findall(r"\d+", seen)[:3]


def test_a_hangup_opens_the_log_anew(audited):
    moved = audited.path.with_suffix(".moved")
    audited.path.rename(moved)
    audited.server.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 20
    while not audited.path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    with Client(audited.server.unix, timeout=60) as client:
        client.ask("Say: 1 2 3 4", temperature=0.0, max_tokens=16)
    while not audited.lines() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert audited.lines()
    assert moved.read_text()


def test_a_pattern_without_end_does_not_stop_the_streams(tmp_path, gguf_path):
    path = tmp_path / "audit.jsonl"
    env = {"ZL_AUDIT_PATTERNS": json.dumps({"evil": EVIL, "number": PATTERNS["number"]})}
    flags = ("--model", str(gguf_path), "--audit-log", str(path), "--max-rows", "8", "--kv-memory", "256MiB")
    for server in serving(tmp_path, *flags, env=env):
        with Client(server.unix, timeout=60) as client:
            # The search in this one takes for ever.
            client.ask(PROMPTS[0], seed=0, type="summarize", max_tokens=80, ignore_eos=True)
            gaps = []
            last = time.monotonic()
            for _ in client.stream(PROMPTS[1], seed=1, max_tokens=60, ignore_eos=True):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
            deadline = time.monotonic() + 30
            while "unsearched" not in (text := path.read_text()) and time.monotonic() < deadline:
                time.sleep(0.1)
        assert '"unsearched":["evil"]' in text
        assert '"name":"number"' in text
        assert max(gaps) < 30
