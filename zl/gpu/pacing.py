"""Pacing: how many prompt tokens may ride in a step, so that decoding rows hardly feel a long prompt.

State: the time of a step without prefill, and the chunk that doubles it. How prompts are cut never changes a result, so
measured times may decide it. Refuses everything but the standard library.
"""

from __future__ import annotations

LEAST = 16
"""Tokens: one tile of the matrix units; less would cost as much."""

SLOWER, FASTER = 2.2, 1.8
"""A step with a chunk may take this many times one without: above, the chunk shrinks; below, it grows."""


class Pacer:
    """Choose the chunk of one prompt beside decoding rows.

    start  tokens of the first chunk, before anything has been measured
    most   tokens a step can hold
    """

    def __init__(self, start: int, most: int):
        self._chunk = float(start)
        self._most = most
        self._plain_ns = 0.0  # a step of decoding rows alone

    @property
    def chunk(self) -> int:
        """Tokens that one prompt may have in a step."""
        return int(self._chunk)

    def landed(self, n_decode: int, n_prefill: int, n_prompts: int, elapsed_ns: int) -> None:
        """Learn from a step that has ended; steps with several prompts, or without decoding rows, teach nothing."""
        if not n_decode or n_prompts > 1:
            return
        if not n_prefill:
            # A stolen core must not make long steps look normal: down at once, up slowly.
            weight = 1.0 if elapsed_ns < self._plain_ns or not self._plain_ns else 0.1
            self._plain_ns += weight * (elapsed_ns - self._plain_ns)
        elif self._plain_ns and n_prefill >= self.chunk:
            ratio = elapsed_ns / self._plain_ns
            if ratio > SLOWER:
                self._chunk = max(LEAST, self._chunk * max(0.5, SLOWER / ratio))
            elif ratio < FASTER:
                self._chunk = min(self._most, self._chunk * 1.1)
