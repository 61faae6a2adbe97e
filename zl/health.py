"""Whether this server lives and whether it takes requests, for probes, the watchdog and pings.

State: where in its life the server is, written by the event loop; readable from any thread. Progress is that of the
step loop, which turns a few times a second even when idle: an event loop that still answers proves nothing. Refuses
torch, asyncio and net.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

STALL_S = 1.5
"""Seconds without a turn of the step loop after which it counts as stuck, so that probes know within 2 s. It is more
where the step that runs may take longer on this machine."""


class Phase(Enum):
    """Where in its life the server is."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Health:
    """Liveness and readiness.

    turned_at   gives the time.monotonic of the step loop's newest sign of progress
    patience_s  gives the seconds that the step in flight may take
    """

    def __init__(
        self,
        turned_at: Callable[[], float],
        patience_s: Callable[[], float] = lambda: 0.0,
        *,
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._turned_at = turned_at
        self._patience_s = patience_s
        self._stall_s = stall_s
        self._clock = clock
        self.phase = Phase.STARTING

    @property
    def stalled_s(self) -> float:
        """Return the seconds since the step loop last made progress."""
        return max(0.0, self._clock() - self._turned_at())

    @property
    def stuck(self) -> bool:
        """Say whether that is longer than it should be."""
        return self.stalled_s >= max(self._stall_s, self._patience_s())

    @property
    def live(self) -> bool:
        """Say whether the engine works; a server that is still starting counts as alive."""
        if self.phase is Phase.STARTING:
            return True
        return self.phase is not Phase.FAILED and not self.stuck

    @property
    def ready(self) -> bool:
        """Say whether requests are taken and will be answered."""
        return self.phase is Phase.READY and self.live

    @property
    def reason(self) -> str:
        """Return why it is not ready, or not alive, in a few words; "ready" if it is."""
        if self.phase is not Phase.FAILED and not self.live:
            return f"the engine has made no progress for {self.stalled_s:.1f} s"
        return self.phase.value
