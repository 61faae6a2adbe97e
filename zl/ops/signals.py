"""Signals of a server, from its first moment to its last: TERM and INT end it, HUP reads the configuration again.

One set of handlers stays in place all along, and what they do changes: between two sets a signal would kill the
process, and the first process of a container would never hear of it (pid_namespaces(7)). State: the handlers, and what
has been asked for. Refuses torch, asyncio, gpu and everything of zl: it is loaded before all of that.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM)
ALL = (*STOPS, signal.SIGHUP)

Soon = Callable[[Callable[[], None]], object]
"""Calls a function on the event loop's thread: `loop.call_soon_threadsafe`."""


class Stopped(SystemExit):
    """A signal has ended the start. Its status is that of a server which was told to stop: 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Signals:
    """What signals do: `install` first of all; a stop then raises Stopped in the main thread, until `hold`.

    hangup_stops  whether losing the terminal is to end this server: where it has one, and whoever started it did not
                  have HUP ignored already, as nohup(1) does
    """

    def __init__(self) -> None:
        self.hangup_stops = False
        self._before: dict[signal.Signals, Any] = {}
        self._asked = self._raised = self._ended = False
        self._held = 0
        self._serving: tuple[Soon, Callable[[], None], Callable[[], None]] | None = None

    def install(self) -> None:
        """Take TERM, INT and HUP from now on; on the main thread."""
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        # One that is ignored stays so until there is something to reload, for the compiler that is started as well.
        self._before[signal.SIGHUP] = signal.SIG_IGN if ignored else signal.signal(signal.SIGHUP, self._arrived)
        self.hangup_stops = not ignored and has_terminal()
        for number in STOPS:  # TERM last: who sees that it is caught knows that all are
            self._before[number] = signal.signal(number, self._arrived)

    def restore(self) -> None:
        """Give the handlers back that were there before, after a failed start; what was to end stays deaf."""
        if not self._ended:
            for number, before in self._before.items():
                signal.signal(number, before)

    def ignore(self) -> None:
        """Hear nothing more, until the process ends: what remains of it is short, and KILL is there."""
        self._ended = True
        for number in ALL:
            signal.signal(number, signal.SIG_IGN)

    def check(self) -> None:
        """Raise Stopped if a stop has been asked for; one raised inside a destructor, say, has got lost."""
        if self._asked and not self._held and not self._ended:
            self._raised = True
            raise Stopped

    def hold(self) -> None:
        """Raise nothing any more: note a stop for `serving`."""
        self._held += 1

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing be raised inside, but right after it."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        self.check()

    @contextlib.contextmanager
    def serving(self, soon: Soon, stop: Callable[[], None], reload: Callable[[], None]) -> Iterator[None]:
        """Call `stop` at each TERM and INT, `reload` at each HUP, by `soon`; afterwards all of them are ignored.

        To be entered after `hold`; a stop that came meanwhile is passed on.
        """
        self._serving = soon, stop, reload
        signal.signal(signal.SIGHUP, self._arrived)
        for number in ALL:
            signal.siginterrupt(number, False)  # native code is not to see its system calls interrupted
        if self._asked:
            stop()
        try:
            yield
        finally:
            self.ignore()

    def terminal_is_lost(self) -> bool:
        """Say whether this server was to end with its terminal, and that has gone."""
        return self.hangup_stops and not has_terminal()

    def _arrived(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._ended:
            return
        if self._serving is not None:
            soon, stop, reload = self._serving
            soon(reload if number == signal.SIGHUP else stop)
            return
        if number == signal.SIGHUP and not self.terminal_is_lost():
            return  # there is nothing to reload yet
        self._asked = True
        # Once: what the first one has begun to take apart is to be taken apart to its end.
        if not self._held and not self._raised:
            self._raised = True
            raise Stopped


def has_terminal() -> bool:
    """Say whether this process has a controlling terminal (tty(4): opening /dev/tty fails without one)."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
