"""The figures that `zl top` shows, worked out of the newest pages of metrics.

State: a Window keeps the scrapes of the last seconds and what was shown last. Refuses torch, numpy and asyncio.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field

from zl.tools.top_scrape import Scrape, gained, gained_buckets, quantile

WINDOW_S = 10.0
"""Latencies and shares are over this long: a second alone has too few answers for a 99th percentile."""
HIT_GOAL = 0.85
"""Share of drawing steps that should run a profile's own program."""
HISTORY = 16

Pair = tuple[float | None, float | None]
"""The 50th and the 99th percentile, seconds; None where nothing was observed."""

_LAYER, _FIRST, _GAP = "glue_layer_latency_seconds", "zl_time_to_first_token_seconds", "zl_inter_token_seconds"
_QUEUED, _WHOLE, _SPENT = "zl_queue_seconds", "zl_e2e_seconds", "zl_request_time_seconds_total"
NOT_GLUE = ("queue", "graph_replay", "heartbeat")
"""The parts of an answer's time that are waiting, the model, and the guard of the model."""
_NO_HIT = ("generic", "mixed")  # steps that drew tokens without a profile's own program; `none` drew nothing


@dataclass(slots=True)
class Figures:
    """What is shown. None: not known. Times in seconds, shares of 1, rates a second.

    facts    what is served, in words           parts       mean time a step or frame of each part of the layer
    errors   error frames by code, in all       new_errors  those of the window
    trouble  why the figures are old, if they are
    """

    address: str
    state: str = "no answer"
    facts: list[str] = field(default_factory=list)
    up_s: float | None = None
    rows: float | None = None
    max_rows: float | None = None
    queue: float | None = None
    connections: float | None = None
    tokens_per_s: float | None = None
    history: list[float] = field(default_factory=list)
    prompt_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    glue: float | None = None
    first: Pair = (None, None)
    gap: Pair = (None, None)
    queued: Pair = (None, None)
    whole: Pair = (None, None)
    pages_used: float | None = None
    pages_constant: float | None = None
    pages: float | None = None
    fragmentation: float | None = None
    hits: float | None = None
    fallback_steps: float | None = None
    beat_age_s: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    new_errors: dict[str, float] = field(default_factory=dict)
    trouble: str = ""


class Window:
    """The scrapes of the last seconds. `add` each new one, or say that it was `missed`; `figures` tells the rest.

    since_start  latencies, shares and new errors are of the server's whole life instead of the last seconds
    """

    def __init__(self, address: str, *, since_start: bool = False):
        self._address = address
        self._since_start = since_start
        self._scrapes: deque[Scrape] = deque()
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._trouble = ""

    def add(self, scrape: Scrape) -> None:
        """Take a scrape that is newer than those before."""
        self._trouble = ""
        if self._scrapes and _restarted(scrape, self._scrapes[-1]):
            self._scrapes.clear()
        self._scrapes.append(scrape)
        while len(self._scrapes) > 2 and scrape.at - self._scrapes[1].at >= WINDOW_S:
            self._scrapes.popleft()
        rate = self._rate("zl_tokens_total", kind="generated")
        if rate is not None:
            self._history.append(rate)

    def missed(self, why: str) -> None:
        """Note that no scrape came; the figures stay those of the last one."""
        self._trouble = why

    def _rate(self, name: str, **labels: str) -> float | None:
        """Say how fast a counter grew between the newest two scrapes."""
        if len(self._scrapes) < 2:
            return None
        old, new = self._scrapes[-2], self._scrapes[-1]
        grown = gained(new, old, name, **labels)
        return None if grown is None or new.at <= old.at else grown / (new.at - old.at)

    def figures(self) -> Figures:
        """Work out the figures of now."""
        out = Figures(self._address, trouble=self._trouble)
        if not self._scrapes:
            return out
        new = self._scrapes[-1]
        old = Scrape(0.0) if self._since_start else self._scrapes[0]
        rows, pages = new.by("zl_rows", "state"), new.by("zl_pages", "state")
        out.state = "no answer" if self._trouble else _state(new)
        out.facts = _facts(new)
        out.up_s = _up(new)
        if rows:
            out.rows, out.max_rows = rows.get("live", 0.0) + rows.get("ending", 0.0), sum(rows.values())
        if pages:
            out.pages_used, out.pages_constant = pages.get("used", 0.0), pages.get("constant", 0.0)
            out.pages = sum(pages.values())
        out.queue = new.value("zl_queue_depth")
        out.connections = new.value("zl_connections_open")
        out.tokens_per_s = self._rate("zl_tokens_total", kind="generated")
        out.history = list(self._history)
        out.prompt_tokens_per_s = self._rate("zl_tokens_total", kind="prompt")
        out.requests_per_s = self._rate("zl_requests_total")
        out.glue = _glue(new, old)
        out.first, out.gap = _pair(new, old, _FIRST), _pair(new, old, _GAP)
        out.queued, out.whole = _pair(new, old, _QUEUED), _pair(new, old, _WHOLE)
        out.fragmentation = new.value("zl_kv_fragmentation_ratio")
        out.hits = _hits(new, old)
        out.fallback_steps = new.value("zl_fallback_steps_total")
        age = new.value("zl_heartbeat_age_seconds")
        out.beat_age_s = age if age is not None and math.isfinite(age) else None
        out.parts = _parts(new, old)
        out.errors = new.by("zl_errors_total", "code")
        out.new_errors = _grown_by(new, old, "zl_errors_total", "code")
        return out


def _restarted(new: Scrape, old: Scrape) -> bool:
    return new.value("process_start_time_seconds") != old.value("process_start_time_seconds")


def _state(new: Scrape) -> str:
    if new.value("zl_live") == 0:
        return "stuck"
    return "ready" if new.value("zl_ready") else "not ready"


def _facts(new: Scrape) -> list[str]:
    told = new.labels("zl_build_info")
    version = f"zl {told['version']}" if "version" in told else ""
    facts = [version, told.get("model", ""), told.get("program", ""), told.get("device", "")]
    return [fact for fact in facts if fact]


def _up(new: Scrape) -> float | None:
    """Say how long the server is up, by this machine's clock."""
    begun = new.value("process_start_time_seconds")
    return None if begun is None else max(0.0, time.time() - begun)


def _grown_by(new: Scrape, old: Scrape, name: str, label: str) -> dict[str, float]:
    """Say how a counter grew, by one label."""
    return {key: gained(new, old, name, **{label: key}) or 0.0 for key in new.by(name, label)}


def _glue(new: Scrape, old: Scrape) -> float | None:
    spent = _grown_by(new, old, _SPENT, "part")
    whole = sum(spent.values())
    return sum(time for part, time in spent.items() if part not in NOT_GLUE) / whole if whole else None


def _hits(new: Scrape, old: Scrape) -> float | None:
    steps = _grown_by(new, old, "zl_program_hits_total", "program")
    drawing = sum(n for program, n in steps.items() if program != "none")
    missed = sum(steps.get(program, 0.0) for program in _NO_HIT)
    return (drawing - missed) / drawing if drawing else None


def _parts(new: Scrape, old: Scrape) -> dict[str, float]:
    spent = _grown_by(new, old, _LAYER + "_sum", "component")
    times = _grown_by(new, old, _LAYER + "_count", "component")
    return {part: spent[part] / n for part, n in times.items() if n and spent.get(part)}


def _pair(new: Scrape, old: Scrape, name: str) -> Pair:
    buckets = gained_buckets(new, old, name)
    return quantile(buckets, 0.5), quantile(buckets, 0.99)
