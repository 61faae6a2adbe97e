"""Log lines: one event a line, with fields, as words, logfmt or JSON; levels as the journal reads them.

State: the handler of the "zl" logger, and the file it writes to. A full disk loses lines, which is counted and said as
soon as it can be. Text of prompts and answers never comes here. Refuses torch, asyncio and whatever serves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from zl.errors import ConfigError

_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""Levels as sd-daemon(3) writes them before a line."""


def event(log: logging.Logger, level: int, text: str, /, **fields: object) -> None:
    """Log an event with fields; a field that is None is left out."""
    if log.isEnabledFor(level):
        log.log(level, "%s", text, extra={"fields": {name: v for name, v in fields.items() if v is not None}})


class Lines(logging.Formatter):
    """Make one line of a record.

    form     text, logfmt or json
    journal  the journal reads the lines: it knows the time itself, and wants the level as <N> before each
    """

    def __init__(self, form: str, journal: bool):
        super().__init__()
        self._form = form
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        fields: Mapping[str, object] = getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info and record.exc_info[1] else ""
        line = (self._text if self._form == "text" else self._fields)(record, text, fields, trace)
        return f"<{_PRIORITY.get(record.levelno, 6)}>{line}" if self._journal else line

    def _text(self, record: logging.LogRecord, text: str, fields: Mapping[str, object], trace: str) -> str:
        words = "".join(f" {name}={_logfmt(value)}" for name, value in fields.items())
        line = f"{record.levelname} {_one_line(text)}{words}"
        if not trace:
            return line
        # A terminal shows a trace as people know it; the journal would take each of its lines for an event.
        return f"{line} | {_one_line(trace)}" if self._journal else f"{line}\n{trace}"

    def _fields(self, record: logging.LogRecord, text: str, fields: Mapping[str, object], trace: str) -> str:
        whole: dict[str, object] = {} if self._journal else {"time": _time(record.created)}
        whole |= {"level": record.levelname.lower(), "msg": text, **fields}
        if trace:
            whole["trace"] = trace
        if self._form == "json":
            return json.dumps(whole, default=str)
        return " ".join(f"{name}={_logfmt(value)}" for name, value in whole.items())


class Logs:
    """Where the "zl" logger's lines go, and how they look; all of it can change while the server runs.

    stderr  taken for the journal where JOURNAL_STREAM names it (systemd.exec(5))
    """

    def __init__(self, stderr: TextIO | None = None, environ: Mapping[str, str] | None = None):
        self._stderr = sys.stderr if stderr is None else stderr
        self._environ = os.environ if environ is None else environ
        self._file: _ToFile | None = None

    def set(self, level: str, form: str, path: str) -> None:
        """Take these settings from now on; a log file is opened anew, so that a rotated one is let go.

        form     auto (logfmt in the journal, else text), text, logfmt or json
        path     a file that lines are added to; empty: stderr
        Raises   ConfigError: the file cannot be opened; nothing has changed then
        """
        file = _ToFile(path, self._stderr) if path else None
        journal = file is None and in_journal(self._stderr, self._environ)
        if form == "auto":
            form = "logfmt" if journal else "text"
        self._use(file, Lines(form, journal))
        logging.getLogger().setLevel(level.upper())

    def close(self) -> None:
        """Close the log file; lines go to stderr again."""
        if self._file is not None:
            self._use(None, self._file.formatter)

    def _use(self, file: _ToFile | None, lines: logging.Formatter | None) -> None:
        handler: logging.Handler = file or logging.StreamHandler(self._stderr)
        handler.setFormatter(lines)
        root = logging.getLogger()
        for old in root.handlers[:]:
            root.removeHandler(old)
        root.addHandler(handler)
        before, self._file = self._file, file
        if before is not None:
            before.close()
            before.tell_lost()


class _ToFile(logging.Handler):
    """Add lines to a file. Each is written at once or lost: nothing waits that closing would have to write.

    path    opened without waiting: a pipe must have its reader
    stderr  hears of the first line that is lost, since nobody looks into a log for what is not in it
    Raises  ConfigError: the file cannot be opened
    """

    def __init__(self, path: str, stderr: TextIO):
        super().__init__()
        self._path, self._stderr = path, stderr
        self._lost, self._why = 0, ""
        self._cut = False  # the file ends in the midst of a line
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
                               | os.O_NONBLOCK, 0o666)  # fmt: skip
            os.set_blocking(self._fd, True)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"log_file {path}: {why}; name a file that this user may write") from error

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            data = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        except Exception:  # a line that cannot be made is a fault of ours, and no reason to end a server
            self.handleError(record)
            return
        try:
            self._write(data)
        except OSError as error:
            self._why = error.strerror or str(error)
            self._lost += 1
            if self._lost == 1:
                with contextlib.suppress(OSError, ValueError):
                    print(f"zl: log_file {self._path}: {self._why}; lines are lost until it can be written",
                          file=self._stderr, flush=True)  # fmt: skip
            return
        self.tell_lost()

    def tell_lost(self) -> None:
        """Log how many lines were lost, in the file or, once this handler has been replaced, in what came after it."""
        if self._lost:
            n, self._lost = self._lost, 0
            event(logging.getLogger("zl"), logging.WARNING, f"log_file {self._path}: {self._why}, lines were lost",
                  lost=n)  # fmt: skip

    def close(self) -> None:
        """Close the file."""
        super().close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _write(self, data: bytes) -> None:
        left = memoryview(b"\n" + data if self._cut else data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        finally:
            self._cut = bool(left) and (self._cut or len(left) < len(data))


def in_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Say whether a stream goes to the journal: JOURNAL_STREAM is its device and inode (systemd.exec(5))."""
    try:
        stat = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM", "") == f"{stat.st_dev}:{stat.st_ino}"


def _logfmt(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    if text and not any(c <= " " or c in '"=\\' or c == "\x7f" for c in text):
        return text
    return _one_line(json.dumps(text, ensure_ascii=False))


def _one_line(text: str) -> str:
    """Show line ends and other control characters, so that no text can begin a line of its own."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _time(created: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created)) + f".{int(created * 1e3) % 1_000:03d}Z"
