"""How long a step may take before it counts as stuck: what ordinary steps took here, several times over.

A fixed limit would call a large model on a slow machine stuck in every long prompt. State: times of steps that ended.
Refuses everything but the standard library.
"""

from __future__ import annotations

SLACK = 4.0
"""How many times an ordinary step's time; machines that are shared slow down by 2 and more."""

ENOUGH_TOKENS = 16
"""A step of fewer tells little about the time of a token: it waits for the weights."""

MOST_S = 600.0
"""Nor more than this: a process that was stopped for an hour has a step of an hour behind it."""

FORGET = 0.95
"""What a step leaves of the longest time before it."""


class Patience:
    """Learn from steps that end; give the limit of one that begins."""

    def __init__(self) -> None:
        self._longest_ns = 0.0  # of late
        self._token_ns = 0.0  # of the newest step with enough tokens, or of the newest at all before one of these
        self._telling = False

    def landed(self, n_tokens: int, elapsed_ns: int) -> None:
        """Take in a step that has ended."""
        self._longest_ns = max(elapsed_ns, self._longest_ns * FORGET)
        telling = n_tokens >= ENOUGH_TOKENS
        if telling or not self._telling:
            self._token_ns = elapsed_ns / n_tokens
        self._telling |= telling

    def limit_s(self, n_tokens: int) -> float:
        """Give the seconds that a step of n_tokens may take; 0 before any has ended."""
        return min(SLACK * max(self._longest_ns, n_tokens * self._token_ns) / 1e9, MOST_S)
