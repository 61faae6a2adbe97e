"""The terminal that `zl top` draws on: taken over while it runs, given back as it was, whatever ends the program.

State: the terminal's settings from before. ANSI sequences and the standard library only, which is what a terminal at
the other end of ssh is sure to understand. Refuses torch, numpy and asyncio.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TextIO

# The alternate screen, no cursor, cleared: xterm's control sequences, which tmux and screen know too.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_END_OF_LINE, _END_OF_SCREEN, _HOME = "\x1b[K", "\x1b[J", "\x1b[H"


class Screen:
    """A terminal in full-screen use. Use as a context manager on the main thread.

    out   where to draw, a terminal
    keys  where keys come from; None where standard input is no terminal, so that only Ctrl-C ends the program
    """

    def __init__(self, out: TextIO = sys.stdout, keys: int | None = None):
        self._out = out
        self._keys = keys
        self._before: list[object] | None = None
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Screen:
        for number, handler in (
            (signal.SIGTSTP, self._suspend), (signal.SIGTERM, self._end), (signal.SIGHUP, self._end),
        ):  # fmt: skip
            self._handlers[number] = signal.signal(number, handler)
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _take(self) -> None:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)  # keys come at once and unseen; Ctrl-C still interrupts
        self._out.write(_ENTER)
        self._out.flush()

    def _give_back(self) -> None:
        self._out.write(_LEAVE)
        self._out.flush()
        if self._keys is not None and self._before is not None:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: leave a usable terminal to the shell, and take it again when the program is continued."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._take()

    def _end(self, number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now."""
        columns, lines = shutil.get_terminal_size()
        return columns, lines

    def draw(self, lines: Sequence[str]) -> None:
        """Replace what is shown; lines are already cut to the width, those below the last line are left out."""
        shown = list(lines)[: self.size[1]]
        self._out.write(_HOME + "\r\n".join(line + _END_OF_LINE for line in shown) + _END_OF_SCREEN)
        self._out.flush()

    def wait(self, seconds: float) -> bool:
        """Wait; True as soon as the user types q."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._keys is None:
                time.sleep(left)
            elif select.select([self._keys], [], [], left)[0]:
                typed = os.read(self._keys, 64)
                if not typed:  # the terminal is gone; a read that finds its end would return at once for ever
                    return True
                if b"q" in typed.lower():
                    return True
        return False
