"""A histogram of fixed buckets: plain integers that one thread adds to and any thread reads.

State: a count a bucket and the sum. Imports bisect only: hot paths may have one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Reading(NamedTuple):
    """What a histogram held at one moment.

    bounds  upper bounds, ascending, without infinity
    counts  one a bound and one for what is above all of them; not cumulative
    total   sum of the values
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Count values by bucket; a value equal to a bound falls below it, as Prometheus has it.

    bounds  upper bounds, ascending, in the unit of the values
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        if not self._bounds or any(a >= b for a, b in zip(self._bounds, self._bounds[1:], strict=False)):
            raise ValueError(f"histogram: bounds must ascend, {self._bounds} do not")
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Take one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def observe_many(self, value: float, times: int) -> None:
        """Take the same value several times, at the cost of one."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    @property
    def count(self) -> int:
        """Return how many values were taken."""
        return sum(self._counts)

    @property
    def total(self) -> float:
        """Return the sum of the values."""
        return self._total

    def read(self) -> Reading:
        """Copy what is there; any thread. Taken while a value is added, sum and counts may differ by that one."""
        return Reading(self._bounds, tuple(self._counts), self._total)


def merge(readings: Iterable[Reading]) -> Reading:
    """Add up histograms of the same buckets, such as those of two threads.

    Raises  ValueError: there is none, or the buckets differ
    """
    first, *others = readings
    counts, total = list(first.counts), first.total
    for other in others:
        if other.bounds != first.bounds:
            raise ValueError("histograms of different buckets cannot be merged")
        counts = [a + b for a, b in zip(counts, other.counts, strict=True)]
        total += other.total
    return Reading(first.bounds, tuple(counts), total)
