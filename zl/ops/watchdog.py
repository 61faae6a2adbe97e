"""The watchdog's food: the progress of the step loop, looked at by the event loop, passed on to the service manager.

Both must turn: no food goes out when the step loop stands still, however well the event loop answers, and none when the
event loop stands still, since nothing looks then. State: one timer, and whether the engine was alive at the last look.
Refuses torch, asyncio (timers come in by constructor) and gpu.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from zl.health import Health, Phase
from zl.ops.notify import Notifier

log = logging.getLogger("zl")

LOOK_S = 0.25
"""Time between two looks: with health.STALL_S, a stall is known within 2 s where steps are short."""


class Timer(Protocol):
    """What is kept of a timer."""

    def cancel(self) -> None:
        """Forget it."""


class Watchdog:
    """Look at `health` a few times a second; feed the manager, and say when the engine stalls or comes back.

    call_later  call_later(seconds, function) -> Timer: the event loop's
    status      gives the line that the manager shows while all is well
    """

    def __init__(
        self,
        health: Health,
        notifier: Notifier,
        call_later: Callable[[float, Callable[[], None]], Timer],
        status: Callable[[], str],
    ):
        self._health = health
        self._notifier = notifier
        self._call_later = call_later
        self._status = status
        self._live = True
        self._timer: Timer | None = None
        self._period_s = min(LOOK_S, notifier.watchdog_s / 4) if notifier.watchdog_s else LOOK_S

    def start(self) -> None:
        """Look now, and from now on."""
        live = self._health.live
        if live != self._live:
            self._turned(live)
        if live and self._notifier.watchdog_s:
            self._notifier.watchdog()
        self._timer = self._call_later(self._period_s, self.start)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turned(self, live: bool) -> None:
        self._live = live
        if live:
            log.warning("the engine makes progress again")
            self._notifier.status(self._status())
            return
        stalled = f"the engine has made no progress for {self._health.stalled_s:.1f} s"
        why = self._health.reason if self._health.phase is Phase.FAILED else stalled
        log.error("%s: not ready, the watchdog is not fed", why)
        self._notifier.status(why)
