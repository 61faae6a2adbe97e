"""The arithmetic of comparing: rounds to ratios, gaps to stretches; that of one trace is in `zl.tools.traces`.

Owns no state.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from zl.tools.traces import Trace


def alternating(systems: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """Order the measurements A B A B …: every system once in each round."""
    return [(i, system) for i in range(rounds) for system in systems]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Divide round by round: the median and the spread are of ratios taken within a round, so machine drift cancels.

    Raises  ValueError: the two have another number of rounds, or none
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} rounds beside {len(theirs)}: ratios need the same number, at least one")
    each = [a / b if b else math.inf for a, b in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(each), "min": min(each), "max": max(each), "each": each}


def gap_stretch(traces: Iterable[Trace], since: float = -math.inf) -> list[float]:
    """Divide each stream's largest gap by its median gap; `since` leaves out gaps that ended before it."""
    out = []
    for t in traces:
        kept = [b - a for a, b in zip(t.arrivals, t.arrivals[1:], strict=False) if b >= since]
        if kept and t.gaps:
            median = statistics.median(t.gaps)
            out.append(max(kept) / median if median else math.inf)
    return out
