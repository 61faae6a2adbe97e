"""What a berth of the arena is to those who read in it after its frame has been taken.

State: none. Refuses torch, numpy, asyncio and net.
"""

from __future__ import annotations

from typing import Protocol


class Lease(Protocol):
    """A berth (`gpu.arena.Berth`) whose bytes stay as they are until `end`, which may be called again."""

    @property
    def ended(self) -> bool:
        """Tell whether the berth has been given back."""

    def offset(self, part: memoryview) -> int:
        """Return the byte of the arena that a view of the berth begins at."""

    def end(self) -> None:
        """Give the berth back."""
