"""zl/audit: which spans are written, with which tokens, and that nothing else is."""

from __future__ import annotations

import json
import re
import stat
from types import SimpleNamespace

import pytest

from zl.audit import DEFAULT_PATTERNS, Audit
from zl.errors import ConfigError
from zl.flags import EOS
from zl.gpu.loop import StepResult
from zl.gpu.pinned import RowColumns
from zl.ids import Ids
from zl.pages import PageBooks
from zl.rows import Job, Rows
from zl.sampling import profiles
from zl.shapes import Shapes
from zl.text.detok import TextStream, TokenTable

PIECES = [b"It costs", b" ", b"$", b"1", b",", b"2", b"50", b".", b"00", b" on", b" 3", b" Mar", b"ch", b" secret",
          b"\xe2\x82", b"\xac", b"%", b"DE", b"<eos>", b" STOP"]  # fmt: skip
CONTROL = frozenset({18})
AMOUNT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]  # It costs $1,250.00 on 3 March secret


def table(first=None) -> TokenTable:
    return TokenTable.of([b"" if i in CONTROL else p for i, p in enumerate(PIECES)], first or {}, CONTROL)


class Kit:
    """Rows and an audit; `say` lets a job say tokens, one a step, and ends it."""

    def __init__(self, path, patterns=(), words=None, **options):
        self.path, self.words = path, words or table()
        self.rows = Rows(4)
        self.audit = Audit(path, patterns, self.words, "build-1", **({"max_bytes": 1 << 20, "keep": 0} | options))

    def job(self, request_id=7, stops=(), audited=True) -> Job:
        job = Job(
            conn=SimpleNamespace(name="tcp-3"), request_id=request_id, prompt=Ids.of([0]), prefix_len=0,
            max_new=99, sampling=profiles.resolve(0), seed=2**64 - 1, stream=TextStream(self.words, stops), arrived=0.0,
        )  # fmt: skip
        if audited:
            self.audit.begin(job)
        self.rows.seat(job)
        return job

    def step(self, *drawn, flag=0):
        tickets = [job.ticket for job, _ in drawn]
        tokens = [token for _, token in drawn]
        result = StepResult(tickets, tokens, [-token / 8 for token in tokens], [flag] * len(drawn), [], [])
        self.audit.step(self.rows, result)

    def say(self, tokens, **more) -> None:
        job = self.job(**more)
        for token in tokens:
            self.step((job, token))
        self.audit.end(job)

    def lines(self) -> list[dict]:
        self.audit.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def test_spans_over_many_tokens_are_written_with_exactly_their_tokens(tmp_path):
    kit = Kit(tmp_path / "a")
    kit.say(AMOUNT)
    amount, date = kit.lines()
    assert amount.pop("time").endswith("Z")
    assert amount == {
        "request_id": 7, "connection": "tcp-3", "build_id": "build-1", "seed": 2**64 - 1, "name": "amount",
        "span": "$1,250.00", "token_index": 2, "token_ids": AMOUNT[2:9], "logprobs": [-t / 8 for t in AMOUNT[2:9]],
    }  # fmt: skip
    assert (date["name"], date["span"], date["token_ids"]) == ("date", "3 March", [10, 11, 12])
    text = kit.path.read_text()
    assert "secret" not in text
    assert "costs" not in text
    assert stat.S_IMODE(kit.path.stat().st_mode) == 0o600


def test_a_character_in_several_tokens(tmp_path):
    kit = Kit(tmp_path / "a")
    kit.say([0, 1, 5, 14, 15, 9])
    (line,) = kit.lines()
    assert (line["span"], line["token_ids"]) == ("2€", [5, 14, 15])


def test_jobs_that_share_steps_are_kept_apart_and_the_end_token_is_no_token(tmp_path):
    kit = Kit(tmp_path / "a")
    one, two, silent = kit.job(1), kit.job(2), kit.job(3, audited=False)
    for a, b in zip([2, 3, 4], [5, 16, 9], strict=True):
        kit.step((one, a), (two, b), (silent, 3))
    kit.step((one, 5), (two, 18), flag=EOS)
    for job in (two, one, silent):
        kit.audit.end(job)
    percentage, amount = kit.lines()
    assert (percentage["request_id"], percentage["span"], percentage["token_ids"]) == (2, "2%", [5, 16])
    assert (amount["request_id"], amount["span"], amount["token_ids"]) == (1, "$1", [2, 3])


def test_what_a_stop_string_kept_from_the_client_is_not_written(tmp_path):
    kit = Kit(tmp_path / "a")
    kit.say([2, 3, 19, 1, 2, 5], stops=[b" STOP"])
    (line,) = kit.lines()
    assert line["span"] == "$1"


def test_a_blank_that_the_first_token_loses(tmp_path):
    kit = Kit(tmp_path / "a", words=table({10: b"3"}))
    kit.say([10, 16, 10, 16])
    assert [(line["span"], line["token_ids"], line["token_index"]) for line in kit.lines()] == [
        ("3%", [10, 16], 0),
        ("3%", [10, 16], 2),
    ]


def test_tokens_after_the_end_belong_to_nobody(tmp_path):
    kit = Kit(tmp_path / "a")
    job = kit.job()
    kit.step((job, 2))
    kit.step((job, 3))
    kit.audit.end(job)
    job.done = True
    kit.step((job, 5))
    kit.audit.end(job)
    assert [line["span"] for line in kit.lines()] == ["$1"]


def test_patterns_are_added_replaced_and_taken_away(tmp_path):
    kit = Kit(tmp_path / "a", [("secret", "sec.et"), ("amount", ""), ("date", "Mar")])
    kit.say(AMOUNT)
    found = [(line["name"], line["span"]) for line in kit.lines()]
    assert found == [("date", "Mar"), ("secret", "secret")]


def test_a_pattern_without_end_is_reported_and_others_are_searched(tmp_path):
    kit = Kit(tmp_path / "a", [("evil", r"(\d+)+$")], words=TokenTable.of([b"1" * 40, b"! $5"], {}, frozenset()),
              timeout_s=0.2)  # fmt: skip
    kit.say([0, 1])
    amount, evil = kit.lines()
    assert (amount["span"], amount["token_ids"]) == ("$5", [1])
    assert (evil["unsearched"], evil["request_id"]) == (["evil"], 7)
    assert "span" not in evil


def test_answers_beyond_the_queue_are_counted_and_said(tmp_path, monkeypatch):
    kit = Kit(tmp_path / "a")
    monkeypatch.setattr(kit.audit.journal, "_max_queue", 0)
    kit.say(AMOUNT)
    assert kit.audit.journal.counters.dropped == 1
    assert [line["lost"] for line in kit.lines()] == [1]


def test_a_process_that_cannot_start_stops_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ConfigError, match="audit_log"):
        Kit(tmp_path / "a")


def test_logprobs_are_computed_where_the_audit_needs_them_and_else_only_if_asked():
    from zl.dispatch import Dispatcher

    shapes = Shapes(max_rows=4, max_model_len=64)
    columns = RowColumns(shapes)
    dispatcher = Dispatcher(shapes, Rows(4), PageBooks(8), columns, lambda *seat: None)
    for audited, asked in [(False, False), (False, True), (True, False)]:
        job = Job(
            conn=None, request_id=1, prompt=Ids.of([0] * 3), prefix_len=0, max_new=4,
            sampling=profiles.resolve(0), seed=1, stream=None, arrived=0.0,
            logprobs=asked, record=object() if audited else None,
        )  # fmt: skip
        dispatcher.admit(job, 0.0)
        assert bool(columns.row_flags[job.ticket.row] & profiles.LOGPROBS) == (audited or asked)


FOUND = {
    "amount": ["$5.50", "USD 1,234,567.89", "1.234,56 €", "12 500 euros", "€ 20 million", "-£3", "5 CHF", "US$ 7bn",
               "30 dollars", "Fr. 20", "¥500", "3'000.50 CHF", "$1,200", "99 cents"],
    "date": ["2024-03-05", "5.3.2024", "12/31/99", "3 March 2024", "March 3rd, 2024", "1st of May", "12. März 2024",
             "5 de mayo de 2023", "March 2024", "Dec. 24", "2024年3月5日", "July 4, 1776", "14 juillet 1789"],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432", "CH93 0076 2011 6238 5295 7"],
    "percentage": ["5%", "3.5 percent", "20 basis points", "-7 ‰", "12,5 Prozent", "100 %"],
}  # fmt: skip
NOT_FOUND = ["version 1.2.3", "at 10.0.0.1", "room 101", "a dollar", "in march we", "chapter 5", "ISO 9001", "AB12 C"]


@pytest.mark.parametrize("name", FOUND)
def test_default_patterns(name):
    for text in FOUND[name]:
        for around in ("{}", "so: {}, yes", "({})", "{}."):
            found = [m.group() for m in re.finditer(DEFAULT_PATTERNS[name], around.format(text))]
            assert found == [text]
    for text in NOT_FOUND:
        assert not re.search(DEFAULT_PATTERNS[name], text), text


@pytest.mark.parametrize("name", DEFAULT_PATTERNS)
def test_default_patterns_take_linear_time(name):
    """Counted in steps of the process's clock: four times the text must not take sixteen times as long."""
    from time import process_time_ns

    pattern = re.compile(DEFAULT_PATTERNS[name])
    for evil in (
        "1",
        "1,111",
        "1 111 ",
        "$",
        "AA11 ",
        "May ",
        "1 January ",
        "DE89",
        "12.12.",
        "1.1",
        "99 99 ",
        "3 of ",
    ):
        spent = []
        for n in (4_000, 16_000):
            begun = min(_timed(pattern, (evil * n)[:n], process_time_ns) for _ in range(3))
            spent.append(begun)
        assert spent[1] < 10 * spent[0] + 5_000_000, (evil, spent)


def _timed(pattern, text, clock) -> int:
    begun = clock()
    pattern.findall(text)
    return clock() - begun
