"""Pacing: how many prompt tokens may ride in a step, so that decoding rows hardly feel a long prompt.

State: the times of steps without prefill, by their rows, and the chunk that makes them twice as long. How prompts are
cut never changes a result, so measured times may decide it. Refuses everything but the standard library.
"""

from __future__ import annotations

LEAST = 16
"""Tokens: one tile of the matrix units; less would cost as much."""

SLOWER, FASTER = 2.0, 1.7
"""A step with a chunk may take this many times one without: above, the chunk shrinks; below, it grows."""


ROWS_A_BIN = 8


class Pacer:
    """Choose the chunk of one prompt beside decoding rows.

    start  tokens of the first chunk, before anything has been measured
    most   tokens a step can hold
    """

    def __init__(self, start: int, most: int):
        self._chunk = float(start)
        self._most = most
        self._plain_ns: dict[int, float] = {}  # a step of decoding rows alone, by their number in bins

    @property
    def chunk(self) -> int:
        """Tokens that one prompt may have in a step."""
        return int(self._chunk)

    def landed(self, n_decode: int, n_prefill: int, n_prompts: int, elapsed_ns: int) -> None:
        """Learn from a step that has ended; steps with several prompts, or without decoding rows, teach nothing."""
        if not n_decode or n_prompts > 1:
            return
        number = (n_decode - 1) // ROWS_A_BIN
        if not n_prefill:
            # A stolen core must not make long steps look normal: down at once, up slowly.
            known = self._plain_ns.get(number)
            weight = 1.0 if known is None or elapsed_ns < known else 0.1
            self._plain_ns[number] = (known or 0.0) + weight * (elapsed_ns - (known or 0.0))
        elif n_prefill >= self.chunk and (plain_ns := self._plain(number)):
            ratio = elapsed_ns / plain_ns
            if ratio > SLOWER:
                self._chunk = max(LEAST, self._chunk * max(0.5, SLOWER / ratio))
            elif ratio < FASTER:
                self._chunk = min(self._most, self._chunk * 1.1)

    def _plain(self, number: int) -> float:
        """Time a step of decoding rows alone: of as many rows, or of the next smaller number that was seen."""
        smaller = [known for known in self._plain_ns if known <= number]
        return self._plain_ns[max(smaller)] if smaller else 0.0
