"""Audit: amounts, dates and the like in what the model writes, with the tokens that they consist of.

A span is written with its name, text, token ids and logprobs, the request's id and seed, and the build id; nothing else
of an answer is. The event-loop thread only gathers token ids; searching and writing are the journal's thread's, and the
patterns run in a process of their own (zl.spans).

State: a record of each audited answer in the making, in its job. Refuses torch, asyncio, net and gpu.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zl.errors import ConfigError
from zl.flags import EOS, NUMERIC
from zl.journal import Journal, Line, utc
from zl.rows import Job, Rows
from zl.spans import Finder, answer_of
from zl.text.detok import TokenTable

_BLANK = r"[ \u00a0\u202f]"
_NUMBER = rf"(?:\d{{1,3}}(?:(?:[.,'’]|{_BLANK})\d{{3}}){{1,6}}(?:[.,]\d{{1,2}})?|\d{{1,18}}(?:[.,]\d{{1,18}})?)(?!\d)"
_SCALE = rf"(?:{_BLANK}?(?i:thousand|million|billion|trillion|tausend|Mio\.?|Mrd\.?|mn|bn|[km])(?!\w))?"
_SIGN = r"(?:[€$£¥₹₽₩₺₴₪฿₫]|US\$|A\$|C\$|HK\$|CHF|Fr\.|EUR|USD|GBP|JPY|CNY|INR|CAD|AUD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|RON)"
_UNIT = rf"(?:{_SIGN}|(?i:euros?|dollars?|pounds?|francs?|Franken|yen|yuan|rupees?|cents?|pence|Kč|zł))(?!\w)"
_MONTH = (
    r"(?i:January|February|March|April|May|June|July|August|September|October|November|December|"
    r"Januar|Jänner|Februar|März|Mai|Juni|Juli|Oktober|Dezember|"
    r"janvier|février|mars|avril|juin|juillet|août|septembre|octobre|novembre|décembre|"
    r"enero|febrero|marzo|abril|mayo|junio|julio|agosto|septiembre|octubre|noviembre|diciembre|"
    r"gennaio|febbraio|aprile|maggio|giugno|luglio|settembre|ottobre|dicembre|"
    r"(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\.?)"
)
_MONTH_NUMBER = r"(?:1[0-2]|0?[1-9])"
_DAY = r"(?:3[01]|[12]\d|0?[1-9])"
_YEAR = rf"(?:,?{_BLANK}(?:(?:de|del){_BLANK})?\d{{4}})"

DEFAULT_PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "amount": rf"(?<![\w.,])[-+−]?{_SIGN}{_BLANK}?[-−]?{_NUMBER}{_SCALE}"
        rf"|(?<![\w.,])[-+−]?{_NUMBER}{_SCALE}(?:-|{_BLANK})?{_UNIT}",
        "date": rf"(?<![\w.-])(?:\d{{4}}[-/.]{_MONTH_NUMBER}[-/.]{_DAY}|{_DAY}[-/.]{_MONTH_NUMBER}[-/.]\d{{2,4}}"
        rf"|{_MONTH_NUMBER}/{_DAY}/\d{{2,4}}|\d{{4}}年\d{{1,2}}月\d{{1,2}}日)(?!\d)"
        rf"|(?<!\w){_DAY}(?:st|nd|rd|th|\.|º)?{_BLANK}(?:(?:of|de|di){_BLANK})?{_MONTH}{_YEAR}?(?!\w)"
        rf"|(?<!\w){_MONTH}{_BLANK}{_DAY}(?:st|nd|rd|th)?{_YEAR}?(?!\w)"
        rf"|(?<!\w){_MONTH}{_YEAR}(?!\w)",
        "iban": r"(?<!\w)[A-Z]{2}\d{2}(?:[ \u00a0]?[A-Z0-9]{4}){2,7}(?:[ \u00a0]?[A-Z0-9]{1,3})?(?!\w)",
        "percentage": rf"(?<![\w.,])[-+−]?{_NUMBER}{_BLANK}?(?:[%‰]"
        r"|(?i:percent|per cent|percentage points?|basis points?|Prozent|pour cent|por ciento|per cento)(?!\w))",
    }
)
"""By name. Every repetition in them is bounded, and none begins inside a number, so a search takes linear time."""

MODE = 0o600
"""Of the file: it is for the server's user alone."""


@dataclass(slots=True)
class Record:
    """The tokens of one answer so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class _Ended(NamedTuple):
    time_ns: int
    request_id: int
    connection: str
    seed: int
    record: Record
    stops: Sequence[bytes]


class Audit:
    """Audit the answers of a server.

    patterns  (name, regular expression); a name of DEFAULT_PATTERNS replaces that one, an empty text removes it
    Raises    ConfigError: the file cannot be opened, or the process that searches not be started
    """

    def __init__(
        self,
        path: str | Path,
        patterns: Iterable[tuple[str, str]],
        table: TokenTable,
        build_id: str,
        *,
        max_bytes: int,
        keep: int,
        timeout_s: float = 1.0,
    ):
        self._table, self._build_id = table, build_id
        merged = {**DEFAULT_PATTERNS, **dict(patterns)}
        self._finder = Finder([(name, text) for name, text in merged.items() if text], timeout_s)
        try:
            self._finder.find("1")  # what is wrong with it shows at start
        except OSError as error:
            raise ConfigError(f"audit_log: {error}; allow this service to start one, or say off") from error
        self.journal = Journal(
            path, self._lines, max_bytes=max_bytes, keep=keep, mode=MODE, durable=True, setting="audit_log"
        )

    def begin(self, job: Job) -> None:
        """Have a new job's tokens recorded; before it is admitted, so that the engine computes logprobs for it."""
        job.record = Record()

    def step(self, rows: Rows, result: Any) -> None:
        """Note the tokens of a gpu.loop.StepResult, before its frames end any job."""
        for ticket, token, logprob, flag in zip(
            result.tickets, result.tokens, result.logprobs, result.flags, strict=True
        ):
            if flag & (EOS | NUMERIC):
                continue
            job = rows.live(ticket)
            if job is not None and job.record is not None:
                job.record.tokens.append(token)
                job.record.logprobs.append(logprob)

    def end(self, job: Job) -> None:
        """Hand over the record of a job that has ended, however it did."""
        record, job.record = job.record, None
        if record is not None and record.tokens:
            stops = job.stream.stops
            self.journal.put(_Ended(time.time_ns(), job.request_id, job.conn.name, job.seed, record, stops))

    def close(self) -> None:
        """Write what waits, and end the searching process."""
        self.journal.close()
        self._finder.close()

    def _lines(self, ended: _Ended) -> Iterator[Line]:
        about = {
            "time": utc(ended.time_ns),
            "request_id": ended.request_id,
            "connection": ended.connection,
            "build_id": self._build_id,
            "seed": ended.seed,
        }
        answer = answer_of(self._table, ended.record.tokens, ended.stops)
        try:
            found = self._finder.find(answer.text)
        except OSError as error:
            yield {**about, "unsearched": self._finder.names, "why": str(error)}
            return
        for name, spans in zip(self._finder.names, found, strict=True):
            if spans is None:
                yield {**about, "unsearched": [name], "why": "the search took too long"}
                continue
            for start, end in spans:
                first, last = answer.tokens_of(start, end)
                yield {
                    **about,
                    "name": name,
                    "span": answer.text[start:end],
                    "token_index": first,
                    "token_ids": ended.record.tokens[first:last],
                    "logprobs": ended.record.logprobs[first:last],
                }
