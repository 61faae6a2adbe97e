"""Ctrl-C, TERM and the loss of the terminal during a procedure that must not be left half done.

State: whether one of them has come, and what is to become of the next; the handlers, while `listening` lasts. Refuses
all but the standard library.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal has come. No Exception: nothing that a procedure gets over.

    status  what a command that it ended leaves with, as the shell has it
    """

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.status = 128 + number


class Interruption:
    """Raises Interrupted on the main thread at the first signal; further ones are only counted, as all are once held.

    n_held  signals that raised nothing
    """

    def __init__(self) -> None:
        self._held = False
        self.n_held = 0

    def hold(self) -> None:
        """Raise nothing from here on: what is done now must not be broken off."""
        self._held = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the signals; not those that whoever started the program had ignored, as nohup(1) does."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        heard = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
        for number in heard:
            signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in heard.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._held:
            self.n_held += 1
            return
        # Before the raise: a second one, however soon, must not break off the undoing that the first one begins.
        self._held = True
        raise Interrupted(number)
