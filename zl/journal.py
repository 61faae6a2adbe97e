"""A journal: an append-only file of JSON lines, written by a thread of its own; who puts something in never waits.

State: the queue, the open file, and its thread. A full queue and a full disk lose entries, which is counted and, as
soon as the file can be written again, said in it. Refuses torch, numpy, asyncio, net and what it is the journal of.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zl.errors import ConfigError
from zl.threads import name_this_thread

log = logging.getLogger("zl")

Line = Mapping[str, Any]
"""What becomes one JSON object."""

BATCH_BYTES = 1 << 20

CLOSING_S = 10.0
"""How long closing waits for what is still to be written."""

YIELD_S = 5e-5
"""Pause after each entry, so that an engine thread back from its step need not wait for the interpreter."""

_ROTATED = re.compile(r"\d{8}T\d{6}\.\d{6}Z")


@dataclass(slots=True)
class JournalCounters:
    """Plain counters, read at scrape. `dropped` is the putting thread's, the others the journal's.

    dropped   entries that found the queue full
    failed    entries that could not be made or written
    """

    lines: int = 0
    bytes: int = 0
    dropped: int = 0
    failed: int = 0
    rotations: int = 0


class _Order:
    """What is put into the queue beside entries: it only wakes the thread."""


class Journal:
    """One journal. `put` is for one thread, `reopen` and `close` for any.

    path       the newest file; its folder must exist
    render     makes the lines of an entry, on the journal's thread
    max_bytes  a file that would grow beyond is put aside under the time of day; one write is never split
    keep       files put aside that stay; 0: all of them
    max_queue  entries that may wait
    durable    whatever was written is on the disk before more is taken
    setting    names the path, for errors and the log
    Raises     ConfigError: the file cannot be opened
    """

    def __init__(
        self,
        path: str | Path,
        render: Callable[[Any], Iterable[Line]],
        *,
        max_bytes: int,
        keep: int,
        max_queue: int = 4_096,
        mode: int = 0o640,
        durable: bool = False,
        setting: str = "journal",
    ):
        self.path = Path(path)
        self._setting = setting
        self._render = render
        self._max_bytes, self._keep, self._max_queue = max_bytes, keep, max_queue
        self._mode, self._durable = mode, durable
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wanted_open = self._ending = False
        self._told = 0  # of the lost entries, those that the file says
        self._healthy = True
        self.counters = JournalCounters()
        self._fd = -1
        try:
            self._open()
        except OSError as error:
            raise _refused(path, setting, error) from error
        self._thread = threading.Thread(target=self._run, name=f"zl-{self.path.stem}", daemon=True)
        self._thread.start()

    def put(self, entry: Any) -> bool:
        """Take an entry; False, and counted, where too many wait already."""
        if self._queue.qsize() >= self._max_queue:
            self.counters.dropped += 1
            return False
        self._queue.put(entry)
        return True

    def reopen(self) -> None:
        """Open the path anew, after a log rotator has moved the file away."""
        self._wanted_open = True
        self._queue.put(_Order())

    def close(self, timeout_s: float = CLOSING_S) -> None:
        """Write what waits, and end the thread; after `timeout_s` it is left behind."""
        self._ending = True
        self._queue.put(_Order())
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s: %d entries were not written in %g s", self.path, self._queue.qsize(), timeout_s)

    # -- the journal's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        name_this_thread(f"zl-{self.path.stem}")
        while not self._ending or not self._queue.empty():
            entry = self._queue.get()
            data, n_entries = [], 0
            size = 0
            while True:
                if not isinstance(entry, _Order):
                    lines = self._lines(entry)
                    data += lines
                    size += sum(map(len, lines))
                    n_entries += bool(lines)
                    time.sleep(YIELD_S)
                if size >= BATCH_BYTES or self._queue.empty():
                    break
                entry = self._queue.get()
            if self._wanted_open:
                self._wanted_open = False
                self._shut()
            self._append(data, n_entries)
        self._shut()

    def _lines(self, entry: Any) -> list[bytes]:
        try:
            return [encoded(line) for line in self._render(entry)]
        except Exception:  # one entry that cannot be made must not end the journal
            log.exception("%s: an entry could not be made", self.path)
            self.counters.failed += 1
            return []

    def _append(self, lines: list[bytes], n_entries: int) -> None:
        counters = self.counters
        lost = counters.dropped + counters.failed
        if lost > self._told:
            lines = [*lines, encoded({"time": utc(time.time_ns()), "lost": lost - self._told})]
        try:
            if self._fd < 0:
                self._open()
            if lines:
                self._write(b"".join(lines))
        except OSError as error:
            counters.failed += n_entries
            if self._healthy:
                log.error("%s: %s; entries are lost until it can be written", self.path, error.strerror or error)
            self._healthy = False
            self._shut()
            return
        self._told = lost
        counters.lines += len(lines)
        if not self._healthy:
            log.warning("%s can be written again, %d entries were lost so far", self.path, lost)
        self._healthy = True

    def _write(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        left = memoryview(data)
        while left:
            n = os.write(self._fd, left)
            self._size += n
            self.counters.bytes += n
            left = left[n:]
        if self._durable:
            os.fdatasync(self._fd)

    def _open(self) -> None:
        self._fd = _opened(self.path, self._mode)
        if not _locked(self._fd):
            # A warning only: where servers take turns (blue and green), two may be up for a while, and both must serve.
            log.warning("%s %s: another server writes to this file too, and each would put it aside under the other: "
                        "give each a file of its own", self._setting, self.path)  # fmt: skip
        self._size = os.fstat(self._fd).st_size
        # Where a crash or a full disk cut a line short, the next one must not be glued to it.
        if self._size and os.pread(self._fd, 1, self._size - 1) not in (b"\n", b""):
            self._size += os.write(self._fd, b"\n")

    def _shut(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1

    def _rotate(self) -> None:
        aside = self.path.with_name(f"{self.path.name}.{_file_stamp()}")
        while aside.exists():
            aside = self.path.with_name(f"{self.path.name}.{_file_stamp()}")
        with contextlib.suppress(FileNotFoundError):  # somebody else's rotation was faster
            self.path.rename(aside)
        self._shut()
        self._open()
        self.counters.rotations += 1
        if self._keep:
            for old in rotated(self.path)[: -self._keep]:
                old.unlink(missing_ok=True)


def check(path: str | Path, setting: str, mode: int = 0o640) -> None:
    """Refuse a path that a Journal could not open; what it would make is made. ConfigError: path, setting, why."""
    try:
        os.close(_opened(Path(path), mode))
    except OSError as error:
        raise _refused(path, setting, error) from error


def _opened(path: Path, mode: int) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
    fresh = not path.exists()
    fd = os.open(path, flags, mode)
    if fresh:
        os.fchmod(fd, mode)  # whatever the umask; what an administrator has changed stays
    return fd


def _refused(path: str | Path, setting: str, error: OSError) -> ConfigError:
    why = error.strerror or error
    return ConfigError(f"{setting} {path}: cannot be appended to: {why}; name another file, or off")


def _locked(fd: int) -> bool:
    """Say whether nobody else has a journal in this file; the lock on the open file tells those who come later.

    It is shared, so that of three the third still learns of the second when the first is gone; only to ask, it is taken
    alone for a moment. It is let go of with the file that is put aside.
    """
    alone = True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        alone = False
    except OSError:
        return True  # a file system without locks
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return alone


def rotated(path: Path) -> list[Path]:
    """List the files of a journal that were put aside, oldest first."""
    prefix = path.name + "."
    names = [
        name
        for name in os.listdir(path.parent)
        if name.startswith(prefix) and _ROTATED.fullmatch(name.removeprefix(prefix))
    ]
    return [path.parent / name for name in sorted(names)]


def encoded(line: Line) -> bytes:
    """Make one line of JSON in ASCII, so that no text in it can end the line."""
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def utc(time_ns: int) -> str:
    """Write a time as RFC 3339 in UTC, with microseconds."""
    seconds, rest = divmod(time_ns, 10**9)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1_000:06d}Z"


def _file_stamp() -> str:
    return utc(time.time_ns()).replace("-", "").replace(":", "")
