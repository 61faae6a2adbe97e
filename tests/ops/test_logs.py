"""Log lines: one event a line in every form, levels for the journal, files that can be rotated."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator

import pytest

from zl.errors import ConfigError
from zl.ops.logs import Logs, event, in_journal

log = logging.getLogger("zl.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(form: str, *calls, level: str = "info") -> list[str]:
    out = io.StringIO()
    logs = Logs(out, {})
    logs.set(level, form, "")
    for call in calls:
        call()
    return out.getvalue().splitlines()


def test_the_same_event_in_every_form():
    def happened() -> None:
        event(log, logging.WARNING, "two words", request_id=7, share=0.25, why='say "a=b"', none=None, flag=True)

    assert lines("text", happened) == ['WARNING two words request_id=7 share=0.25 why="say \\"a=b\\"" flag=true']
    (line,) = lines("logfmt", happened)
    stamp, _, rest = line.partition(" ")
    assert stamp.startswith("time=20")
    assert rest == 'level=warning msg="two words" request_id=7 share=0.25 why="say \\"a=b\\"" flag=true'
    (line,) = lines("json", happened)
    found = json.loads(line)
    del found["time"]
    assert found == {"level": "warning", "msg": "two words", "request_id": 7, "share": 0.25, "why": 'say "a=b"',
                     "flag": True}  # fmt: skip


@pytest.mark.parametrize("form", ["text", "logfmt", "json"])
def test_no_text_can_begin_a_line_of_its_own(form):
    nasty = "a\n<0>b\r\x1b[31m\u2028é\udc80"

    def happened() -> None:
        log.info("said %s", nasty)
        event(log, logging.INFO, "said", text=nasty)

    assert len(lines(form, happened)) == 2
    assert not any("\x1b" in line for line in lines(form, happened))


def test_a_trace_is_one_line_where_lines_are_events():
    def happened() -> None:
        try:
            raise ValueError("oh")
        except ValueError as failure:
            log.error("it broke", exc_info=failure)

    for form in ("logfmt", "json"):
        (line,) = lines(form, happened)
        assert "ValueError: oh" in line
    assert len(lines("text", happened)) > 2  # for people


def test_level_and_unknown_fields_are_kept_apart():
    assert lines("text", lambda: log.info("x"), lambda: log.error("y"), level="error") == ["ERROR y"]


def test_the_journal_gets_levels_and_no_times(tmp_path):
    path = tmp_path / "journal"
    with path.open("w+") as stream:
        stat = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}
        assert in_journal(stream, environ)
        assert not in_journal(stream, {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino + 1}"})
        assert not in_journal(io.StringIO(), environ)
        logs = Logs(stream, environ)
        logs.set("debug", "auto", "")
        log.debug("d")
        log.info("i")
        log.warning("w")
        try:
            raise ValueError("two\nlines")
        except ValueError as failure:
            log.error("e", exc_info=failure)
        logs.set("debug", "text", "")
        log.info("a\nb")
    found = path.read_text().splitlines()
    assert found[:3] == ["<7>level=debug msg=d", "<6>level=info msg=i", "<4>level=warning msg=w"]
    assert found[3].startswith("<3>level=error msg=e trace=")
    assert found[4:] == ["<6>INFO a\\nb"]


def test_a_rotated_file_is_let_go_at_the_next_set(tmp_path):
    path = tmp_path / "zl.log"
    logs = Logs(io.StringIO(), {})
    logs.set("info", "text", str(path))
    log.info("one")
    path.rename(tmp_path / "old")
    log.info("two")
    logs.set("info", "text", str(path))
    log.info("three")
    assert (tmp_path / "old").read_text() == "INFO one\nINFO two\n"
    assert path.read_text() == "INFO three\n"
    with pytest.raises(ConfigError, match=r"log_file /nonexistent/x: No such file or directory; name a file"):
        logs.set("debug", "json", "/nonexistent/x")
    log.info("four")
    assert path.read_text() == "INFO three\nINFO four\n"
    logs.close()
    log.info("five")
    assert path.read_text().endswith("four\n")
