"""zl/journal: order, rotation, reopening, and what becomes of entries where queue or disk are full."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from zl.errors import ConfigError
from zl.journal import Journal, check, rotated, utc


def make(path: Path, render=None, **options) -> Journal:
    return Journal(path, render or (lambda entry: [entry]), **({"max_bytes": 1 << 20, "keep": 3} | options))


def lines(path: Path) -> list[dict]:
    text = path.read_bytes()
    assert not text or text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


class Gate:
    """A render that waits until it is let through."""

    def __init__(self):
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, entry):
        self.entered.set()
        assert self.open.wait(10)
        return [entry]


def test_every_entry_is_written_once_and_in_order(tmp_path):
    journal = make(tmp_path / "j")
    for n in range(3_000):
        assert journal.put({"n": n})
    journal.close()
    assert [line["n"] for line in lines(tmp_path / "j")] == list(range(3_000))
    assert journal.counters.lines == 3_000
    assert journal.counters.bytes == (tmp_path / "j").stat().st_size
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) & 0o027 == 0


def test_a_second_journal_goes_on_where_the_first_ended_even_inside_a_line(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"n":1}\n{"n":')
    journal = make(path, durable=True)
    journal.put({"n": 3})
    journal.close()
    assert path.read_bytes() == b'{"n":1}\n{"n":\n{"n":3}\n'


def test_no_text_can_end_a_line(tmp_path):
    journal = make(tmp_path / "j")
    nasty = 'a\n\r\0\u2028\x85"\\\ud800 é'
    journal.put({"span": nasty})
    journal.close()
    assert (tmp_path / "j").read_bytes().count(b"\n") == 1
    assert lines(tmp_path / "j") == [{"span": nasty}]


@pytest.mark.parametrize(("keep", "left"), [(2, 2), (0, 9)])
def test_rotation_puts_files_aside_and_keeps_the_newest(tmp_path, keep, left):
    path = tmp_path / "j"
    (tmp_path / "j.notes").write_text("not ours")
    journal = make(path, max_bytes=110, keep=keep)
    for n in range(100):
        journal.put({"n": f"{n:02d}"})
        until(lambda n=n: journal.counters.lines == n + 1)  # one write each: how many share one is the clock's matter
    journal.close()
    files = [*rotated(path), path]
    assert len(files) == left + 1
    assert journal.counters.rotations == 9
    assert all(file.stat().st_size <= 110 for file in files)
    seen = [int(line["n"]) for file in files for line in lines(file)]
    assert seen == list(range(100 - len(seen), 100))
    assert len(seen) == 100 if not keep else len(seen) == 10 * len(files)
    assert (tmp_path / "j.notes").read_text() == "not ours"


def test_reopen_leaves_the_moved_file_alone(tmp_path):
    path = tmp_path / "j"
    journal = make(path)
    journal.put({"n": 1})
    until(lambda: journal.counters.lines == 1)
    path.rename(tmp_path / "moved")
    journal.put({"n": 2})
    until(lambda: journal.counters.lines == 2)
    journal.reopen()
    until(path.exists)
    journal.put({"n": 3})
    journal.close()
    assert [line["n"] for line in lines(tmp_path / "moved")] == [1, 2]
    assert [line["n"] for line in lines(path)] == [3]


def test_a_full_queue_drops_without_waiting_and_says_so(tmp_path):
    gate = Gate()
    journal = make(tmp_path / "j", gate, max_queue=2)
    journal.put({"n": 0})
    assert gate.entered.wait(10)
    assert [journal.put({"n": n}) for n in (1, 2, 3, 4)] == [True, True, False, False]
    assert journal.counters.dropped == 2
    gate.open.set()
    journal.close()
    written = lines(tmp_path / "j")
    assert [line["n"] for line in written if "n" in line] == [0, 1, 2]
    assert [line["lost"] for line in written if "lost" in line] == [2]


def test_an_entry_that_cannot_be_made_is_counted_and_others_go_on(tmp_path, caplog):
    journal = make(tmp_path / "j", lambda entry: [{"n": 1 // entry}])
    for n in (1, 0, 1):
        journal.put(n)
    journal.close()
    written = lines(tmp_path / "j")
    assert sum("n" in line for line in written) == 2
    assert sum(line.get("lost", 0) for line in written) == 1
    assert journal.counters.failed == 1
    assert "could not be made" in caplog.text


def test_a_disk_that_refuses_loses_entries_and_says_so_afterwards(tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    journal = make(folder / "j")
    journal.put({"n": 1})
    until(lambda: journal.counters.lines == 1)
    folder.rename(tmp_path / "away")
    journal.reopen()
    until(lambda: "entries are lost" in caplog.text)
    journal.put({"n": 2})
    until(lambda: journal.counters.failed == 1)
    (tmp_path / "away").rename(folder)
    journal.put({"n": 3})
    journal.close()
    written = lines(folder / "j")
    assert [line["n"] for line in written if "n" in line] == [1, 3]
    assert written[-1]["lost"] == 1
    assert "can be written again" in caplog.text


def test_a_full_disk_cuts_a_line_and_the_next_starts_anew(tmp_path, monkeypatch):
    journal = make(tmp_path / "j")
    real, room = os.write, [4]

    def short(fd, data):
        if fd != journal._fd or room is None:
            return real(fd, data)
        n = min(room[0], len(data))
        room[0] -= n
        if not n:
            raise OSError(28, "No space left on device")
        return real(fd, bytes(data[:n]))

    monkeypatch.setattr(os, "write", short)
    journal.put({"n": 1})
    until(lambda: journal.counters.failed == 1)
    room[0] = 10**6
    journal.put({"n": 2})
    journal.close()
    first, *rest = (tmp_path / "j").read_bytes().splitlines()
    assert first == b'{"n"'
    assert [list(json.loads(line)) for line in rest] == [["n"], ["time", "lost"]]


def test_a_path_that_cannot_be_opened_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"none/j: cannot be appended to: No such file"):
        make(tmp_path / "none" / "j")
    with pytest.raises(ConfigError, match="Is a directory"):
        make(tmp_path)


def test_a_path_is_checked_without_a_journal_and_named_with_its_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"^audit_log .*none/j: cannot be appended to: No such file.*; name another"):
        check(tmp_path / "none" / "j", "audit_log")
    with pytest.raises(ConfigError, match=r"^access_log .*Is a directory"):
        make(tmp_path, setting="access_log")
    check(tmp_path / "j", "audit_log", 0o600)
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o600
    (tmp_path / "j").write_bytes(b"kept\n")
    check(tmp_path / "j", "audit_log")
    assert (tmp_path / "j").read_bytes() == b"kept\n"


def test_two_journals_on_one_file_are_warned_of_by_each_that_comes_later(tmp_path, caplog):
    path = tmp_path / "j"
    first = make(path, setting="access_log")
    check(path, "access_log")  # a look is no second journal
    assert caplog.text == ""
    second = make(path, setting="access_log")
    assert f"access_log {path}: another server writes to this file too" in caplog.text
    first.put({"n": 1})
    first.close()
    caplog.clear()
    third = make(path)  # the first is gone, the second is not
    assert "another server" in caplog.text
    caplog.clear()
    third.close()
    second.put({"n": 2})
    second.close()
    last = make(path)
    last.close()
    assert caplog.text == ""
    assert [line["n"] for line in lines(path)] == [1, 2]


def test_the_lock_goes_with_the_file_that_is_put_aside(tmp_path, caplog):
    path = tmp_path / "j"
    journal = make(path, max_bytes=100)
    for n in range(8):
        journal.put({"n": n, "padding": "x" * 20})
        until(lambda n=n: journal.counters.lines > n)
    assert journal.counters.rotations > 1
    path.rename(tmp_path / "moved")
    journal.reopen()
    until(path.exists)
    assert caplog.text == ""
    second = make(path)
    assert "another server" in caplog.text
    second.close()
    journal.close()


def test_close_does_not_wait_for_ever(tmp_path, caplog):
    gate = Gate()
    journal = make(tmp_path / "j", gate)
    journal.put({"n": 1})
    assert gate.entered.wait(10)
    begun = time.monotonic()
    journal.close(timeout_s=0.05)
    assert time.monotonic() - begun < 5
    assert "not written" in caplog.text
    gate.open.set()
    journal.close()


def test_times_are_utc_with_microseconds():
    assert utc(0) == "1970-01-01T00:00:00.000000Z"
    assert utc(1_700_000_000_123_456_789) == "2023-11-14T22:13:20.123456Z"
