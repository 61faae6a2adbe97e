"""Read a text file whole: the files of the configuration, which a server reads again on its event loop's thread.

Owns no state; refuses everything of zl but errors.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from zl.errors import ConfigError

MAX_BYTES = 16 << 20
"""Nothing that somebody wrote by hand is larger."""


def read_text(what: str, path: str | Path, remedy: str = "", *, once: bool = False) -> str:
    """Read a regular file of UTF-8.

    what    begins the text of an error, before the path
    remedy  ends it, where the file cannot be read
    once    nobody reads it again, or is kept waiting: a pipe will do
    Raises  ConfigError: it cannot be read, is too large, or nothing that can be read without waiting: a pipe, say
    """
    try:
        # A pipe would keep us in open(2) until somebody writes to it, a device for as long as it likes in read(2).
        fd = os.open(path, os.O_RDONLY | (0 if once else os.O_NONBLOCK) | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not (once and stat.S_ISFIFO(found.st_mode)) and not stat.S_ISREG(found.st_mode):
                again = "" if once else "; a server reads it again at each reload: name one that stays"
                raise ConfigError(f"{what} {path}: is no regular file but {_kind(found.st_mode)}{again}")
            if found.st_size > MAX_BYTES:
                raise ConfigError(f"{what} {path}: has {found.st_size} bytes, more than {MAX_BYTES}; the wrong one?")
            with open(fd, "rb", closefd=False) as file:
                return file.read(MAX_BYTES).decode("utf-8")
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what} {path}: {why}" + (f"; {remedy}" if remedy else "")) from error


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a device"
