"""A check's time: each section says what it needs, runs if that is left, and is named in the result if it is not.

State: when the check began, and what each section took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.gpu.report import Report

TOTAL_S = 480.0
"""A check on one GPU takes no longer."""

START_S = 15.0
"""Interpreter, imports, the device's context, registration."""

PLAN: dict[tuple[str, str], float] = {
    ("tiny", "kernels"): 25,
    ("tiny", "program"): 35,
    ("llama-3.1-8b", "kernels"): 35,
    ("llama-3.1-8b", "program"): 60,
    ("llama-3.2-1b", "kernels"): 30,
    ("llama-3.2-1b", "program"): 35,
    ("service", "socket"): 60,
    ("qwen2.5-7b", "kernels"): 35,
    ("qwen2.5-7b", "program"): 45,
    ("llama-3.2-1b", "peer"): 55,
    ("llama-3.1-8b", "peer"): 45,
}
"""Seconds of each section in the order in which they run: estimates, made without a GPU. Together with the start they
fit the total; what a run really took is in its result, beside the estimate."""


class Budget:
    """Run sections while there is time.

    total_s  seconds from now to the end of the last section
    """

    def __init__(self, total_s: float = TOTAL_S, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = clock() + total_s
        self.total_s = total_s
        self.sections: list[dict[str, Any]] = []

    @property
    def left_s(self) -> float:
        """Tell how much is left."""
        return self._end - self._clock()

    def section(self, report: Report, model: str, name: str, seconds: float, work: Callable[[], object]) -> None:
        """Run a section that needs `seconds`, or say that it was skipped; one that raises counts as failed."""
        if self.left_s < seconds:
            why = f"{seconds:.0f} s needed, {max(0.0, self.left_s):.0f} of {self.total_s:.0f} s left"
            report.skip(model, name, why)
            self.sections.append({"model": model, "section": name, "planned_s": seconds, "took_s": None})
            return
        begun = self._clock()
        try:
            work()
        except Exception as failure:  # the other sections still tell something, and so does where this one ended
            report.prove(model, f"section {name}", False, f"{type(failure).__name__}: {failure}"[:500])
        took = self._clock() - begun
        self.sections.append({"model": model, "section": name, "planned_s": seconds, "took_s": round(took, 1)})
