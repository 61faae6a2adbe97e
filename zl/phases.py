"""Phases: where a start or a build spends its time.

State: the seconds of each finished phase, in order. Refuses everything of zl.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path


class Phases:
    """Time named phases; a phase inside another counts for itself only.

    on_begin  called with the name of each phase as it begins
    """

    def __init__(self, on_begin: Callable[[str], None] | None = None) -> None:
        self.on_begin = on_begin
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    def add(self, name: str, seconds: float) -> None:
        """Book time that was measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        if self.on_begin is not None:
            self.on_begin(name)
        begun = time.monotonic()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = time.monotonic() - begun
            self.add(name, spent - self._inner.pop())
            if self._inner:
                self._inner[-1] += spent

    def lines(self, total: str, seconds: float) -> list[str]:
        """Return a table, one phase a line, with a total and what no phase claims."""
        rows = [*self.seconds.items()]
        rest = seconds - sum(self.seconds.values())
        if rest > 0.05:
            rows.append(("other", rest))
        rows.append((total, seconds))
        width = max(len(name) for name, _ in rows)
        return [f"  {name:<{width}} {spent:7.2f} s" for name, spent in rows]


def since_exec() -> float:
    """Return the seconds since this process began, as the kernel knows it (to a hundredth)."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begun = int(stat[19]) / os.sysconf("SC_CLK_TCK")  # starttime, field 22 of proc(5), since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun
