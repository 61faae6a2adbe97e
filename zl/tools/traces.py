"""What a load generator saw, and the arithmetic of it: traces to figures, arrival times. Owns no state; stdlib only."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TAIL = (50.0, 90.0, 99.0)


@dataclass(slots=True)
class Trace:
    """What the client saw of one request. Times are seconds of one monotonic clock.

    arrivals  when each frame that carried tokens came
    n_tokens  tokens of the answer as the server counts them, else as frames were counted
    usage     further figures of the server's own, as it sent them
    """

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    n_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def first(self) -> float:
        """Time to the first token frame, seconds."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive token frames."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first, None for answers of one token; independent of how tokens share frames."""
        if self.n_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.n_tokens - 1)


def percentile(values: Sequence[float], q: float) -> float:
    """Interpolate linearly between order statistics, q in 0..100 (numpy's default rule)."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def describe(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (of the population), p50, p90, p99, min, max; empty for no values."""
    if not values:
        return {}
    figures = {"n": float(len(values)), "mean": statistics.fmean(values), "sd": statistics.pstdev(values)}
    figures |= {f"p{q:g}": percentile(values, q) for q in TAIL}
    return figures | {"min": min(values), "max": max(values)}


def summarise(traces: Sequence[Trace]) -> dict[str, Any]:
    """Put one round's traces into figures.

    tokens_per_s counts from the first request sent to the last token come, so prefill is inside.
    Raises  ValueError: no trace has a token
    """
    good = [t for t in traces if t.arrivals and not t.error]
    if not good:
        first = next((t.error for t in traces if t.error), "no token came")
        raise ValueError(f"all {len(traces)} requests failed; the first: {first}")
    gaps = [gap for t in good for gap in t.gaps]
    begun, ended = min(t.sent for t in good), max(t.arrivals[-1] for t in good)
    tokens = sum(t.n_tokens for t in good)
    firsts = [t.first for t in good]
    per_token = [p for t in good if (p := t.per_token) is not None]
    return {
        "requests": len(traces),
        "failed": len(traces) - len(good),
        "errors": sorted({t.error for t in traces if t.error})[:3],
        "tokens": tokens,
        "frames": sum(len(t.arrivals) for t in good),
        "prompt_tokens": sum(t.prompt_tokens for t in good),
        "seconds": ended - begun,
        "tokens_per_s": tokens / (ended - begun) if ended > begun else math.inf,
        "first_s": describe(firsts),
        "gap_s": describe(gaps),
        "per_token_s": describe(per_token),
        "first_curve_s": [percentile(firsts, q) for q in range(101)],
        "gap_curve_s": [percentile(gaps, q) for q in range(101)] if gaps else [],
        "usage": {key: sum(t.usage.get(key, 0) for t in good) for key in sorted({k for t in good for k in t.usage})},
    }


def poisson_times(n: int, rate: float, seed: int) -> list[float]:
    """Draw n arrival times, seconds from 0, of a Poisson stream of `rate` a second.

    The same seed gives every system the same pattern, scaled to its rate.
    """
    rng = random.Random(seed)
    at, times = 0.0, []
    for _ in range(n):
        at += rng.expovariate(1.0) / rate
        times.append(at)
    return times
