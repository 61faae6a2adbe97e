"""What the server sees of a guarded program, whichever device it runs on. State: counters and the sign of progress.

Refuses torch, rows, dispatch, net and asyncio.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from zl.gpu.heartbeat import Heartbeat
from zl.shapes import Shapes


@dataclass(slots=True)
class GuardCounters:
    """Plain counters, read at scrape."""

    beats: int = 0
    beats_failed: int = 0
    retired: int = 0
    recaptured: int = 0
    recaptures_failed: int = 0
    rebuilt_rows: int = 0
    saved_rows: int = 0  # gave no result, and did when computed again


class Guarded(ABC):
    """An Engine (gpu.programs) that checks its program at step boundaries, retires it when it is damaged, mends it.

    name        of the program
    fallback    whether something slower computes in its place now
    heartbeat   canary and patrol
    progress_at newest sign of progress, by the guard's clock: mending takes seconds in which no step ends
    """

    name: str
    fallback: bool
    heartbeat: Heartbeat
    progress_at: float

    def __init__(self, clock: Callable[[], float]):
        self.counters = GuardCounters()
        self.fallback = False
        self._clock = clock
        self._on_retire: Callable[[], None] = lambda: None
        self.progress_at = clock()

    def on_retire(self, tell: Callable[[], None]) -> None:
        """Set what is called, on the engine thread, when KV written so far must not reach new rows."""
        self._on_retire = tell

    @property
    @abstractmethod
    def serving(self) -> str:
        """Name what computes steps now."""

    def inner_ns(self) -> tuple[int, int]:
        """Tell what the newest step spent on its context and on sampling; (0, 0) where the program keeps no clock."""
        return 0, 0

    @property
    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Count what the program holds, bytes by component."""

    @property
    def beat_age_s(self) -> float:
        """Tell how long ago the last good heartbeat was; infinite where the check is off."""
        now = self._clock()
        return math.inf if self.heartbeat.pause(now) is None else now - self.heartbeat.beaten_at

    @abstractmethod
    def launch(self, slot: int) -> int:
        """Start a step."""

    @abstractmethod
    def wait(self, seq: int) -> None:
        """Wait for a step."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; no step may be in flight. Idempotent."""

    @abstractmethod
    def between(self) -> float | None:
        """Do what is due, with no step in flight; return the seconds an idle loop may sleep, None for ever."""

    def due(self) -> bool:
        """Tell whether `between` has something to do: a loop that runs ahead lets its steps end first."""
        return self.heartbeat.pause(self._clock()) == 0.0


def words(failure: Exception) -> str:
    """Put a failure in words for the log."""
    return f"{type(failure).__name__}: {failure}"


def drawn_bytes(shapes: Shapes) -> int:
    """Count the bytes that a guard keeps of drawn tokens: int32, a place more a row than the model is long."""
    return 4 * shapes.max_rows * (shapes.max_model_len + 1)
