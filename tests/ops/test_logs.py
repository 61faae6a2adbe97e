"""Log lines: one event a line in every form, levels for the journal, files that can be rotated."""

from __future__ import annotations

import errno
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


# --- a disk that is full ----------------------------------------------------------------------------------------------


@pytest.fixture
def writes(monkeypatch):
    """Let the disk be full: `writes.room` bytes still fit, None is no limit."""

    class Writes:
        room: int | None = None

    real = os.write

    def write(fd: int, data: bytes | memoryview) -> int:
        if Writes.room is None:
            return real(fd, data)
        if not Writes.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = real(fd, data[: Writes.room])
        Writes.room -= n
        return n

    monkeypatch.setattr("zl.ops.logs.os.write", write)
    return Writes


def test_a_full_disk_loses_lines_which_is_said_on_stderr_once_and_in_the_log_when_it_can_be(tmp_path, writes):
    path, err = tmp_path / "zl.log", io.StringIO()
    logs = Logs(err, {})
    logs.set("info", "text", str(path))
    log.info("one")
    writes.room = 6
    log.info("two")  # cut short in the file
    log.info("three")
    writes.room = None
    log.info("four")
    log.info("five")
    assert path.read_text().splitlines() == [
        "INFO one", "INFO t", "INFO four",
        f"WARNING log_file {path}: No space left on device, lines were lost lost=2", "INFO five",
    ]  # fmt: skip
    assert err.getvalue() == f"zl: log_file {path}: No space left on device; lines are lost until it can be written\n"


@pytest.mark.parametrize("after", ["stderr", "another file"])
def test_a_log_file_on_a_full_disk_can_be_left_and_what_follows_says_so(tmp_path, after):
    path, err = str(tmp_path / "zl.log"), io.StringIO()
    logs = Logs(err, {})
    logs.set("info", "text", "/dev/full")
    log.info("lost")
    log.info("lost")
    logs.set("info", "text", "" if after == "stderr" else path)
    log.info("kept")
    said = err.getvalue().splitlines()
    if after != "stderr":
        said = said[:1] + (tmp_path / "zl.log").read_text().splitlines()
    assert said == [
        "zl: log_file /dev/full: No space left on device; lines are lost until it can be written",
        "WARNING log_file /dev/full: No space left on device, lines were lost lost=2",
        "INFO kept",
    ]
    logs.set("info", "text", "/dev/full")
    log.info("lost")
    logs.close()  # as a server does whose engine is stuck
    log.info("on stderr")
    assert err.getvalue().splitlines()[-1] == "INFO on stderr"


def test_a_log_file_that_is_a_pipe_without_a_reader_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "p")
    logs = Logs(io.StringIO(), {})
    logs.set("info", "text", "")
    with pytest.raises(ConfigError, match=r"log_file .*/p: No such device or address"):
        logs.set("info", "text", str(tmp_path / "p"))
    reader = os.open(tmp_path / "p", os.O_RDONLY | os.O_NONBLOCK)
    logs.set("info", "text", str(tmp_path / "p"))
    log.info("one")
    assert os.read(reader, 100) == b"INFO one\n"
    os.close(reader)
    log.info("nobody reads")
    logs.close()
