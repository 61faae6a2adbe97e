"""Standard input, output and error: descriptors that are there from the first moment, and one that fails.

A descriptor below 3 that is closed (`>&-`, a bad service manager) is given to the next file or socket that is opened:
a print would then go to a peer, and libuv aborts. So each is opened on /dev/null before anything else is. Python marks
a stream that was closed at the start with None: `sys.stdin` and `sys.stdout` stay so for those who want to say so.
State: of standard output and error, why the last write that failed did. Refuses all but the standard library and
zl.errors.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from zl.errors import ConfigError


class _Descriptor(io.FileIO):
    """Where a standard stream's bytes go; remembers a failure, so that no other OSError is taken for it."""

    error: OSError | None = None

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            self.error = error
            raise


def occupy() -> None:
    """Open the standard descriptors that are closed on /dev/null; what goes to a closed standard error vanishes.

    From here on a failure of standard output or error is known to be theirs: `lost` tells it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest that is free: this one
    if sys.stderr is None:  # print(file=None) would print to standard output
        sys.stderr = _text(2)
    sys.stdout, sys.stderr = _watched(sys.stdout, 1), _watched(sys.stderr, 2)


def _text(fd: int) -> TextIO:
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)


def _watched(stream: TextIO, fd: int) -> TextIO:
    """Give a stream like this one whose failures are remembered; the same, where it is not the interpreter's own."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if not isinstance(stream, io.TextIOWrapper) or type(raw) is not io.FileIO or raw.fileno() != fd:
        return stream
    own = _Descriptor(fd, "w", closefd=False)
    buffered = isinstance(buffer, io.BufferedWriter)  # it is not with PYTHONUNBUFFERED
    return io.TextIOWrapper(
        io.BufferedWriter(own) if buffered else own,
        encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )  # fmt: skip


def _descriptor(stream: TextIO) -> _Descriptor | None:
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, _Descriptor) else None


def need_output() -> None:
    """Raise ConfigError where standard output is closed: for those whose whole work is what they print."""
    if sys.stdout is None:
        raise ConfigError("standard output is closed: there is nowhere to print to; to print nothing, write >/dev/null")


def ignore_output() -> None:
    """Let what is printed vanish where standard output is closed: for those whose work is something else."""
    if sys.stdout is None:
        sys.stdout = _text(1)


def standard_input() -> TextIO:
    """Give standard input. ConfigError: it is closed."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed: name what to read, or give it something to read")
    return sys.stdin


def lost() -> dict[str, OSError]:
    """Flush standard output and error; say for each, by "stdout" and "stderr", why it could not be written, if so.

    What it has not taken is dropped with all that follows, so that the interpreter's own flush at its end cannot fail.
    """
    found: dict[str, OSError] = {}
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if stream is None:
            continue
        failed = _descriptor(stream)
        error = failed.error if failed is not None else None
        try:
            stream.flush()
        except OSError as now:
            error = error or now
        if error is not None:
            found[name] = error
            _drop(stream)
    return found


def explain(error: OSError) -> str:
    """Say that standard output failed, and why."""
    return f"standard output cannot be written: {error.strerror or error}"


class Teller:
    """Tells what a long work is doing, a line each, and never stops it: no call raises OSError.

    Lines go to standard output; once that fails, to standard error; once that fails too, nowhere.
    State: whether standard output has failed.
    """

    def __init__(self) -> None:
        self._failed = False

    def __call__(self, line: str) -> None:
        """Tell a line."""
        if not self._failed:
            try:
                print(line, flush=True)
                return
            except OSError as error:
                self._failed = True
                _drop(sys.stdout)
                self._note(f"zl: {explain(error)}: the rest is told here")
        self._note(line)

    def _note(self, line: str) -> None:
        try:
            print(line, file=sys.stderr, flush=True)
        except OSError:
            _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    if (own := _descriptor(stream)) is not None:
        own.error = None
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
