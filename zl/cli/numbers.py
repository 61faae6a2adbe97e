"""Numbers on the command line: what argparse takes for seconds, rates and counts, and what it says to the rest.

Owns no state.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def seconds(text: str) -> float:
    """Read a time to wait: above 0; `inf` waits for ever."""
    number = _float(text)
    if number is None or not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0, such as 2.5, or inf for ever")
    return number


def above_zero(text: str) -> float:
    """Read a number above 0 that ends somewhere."""
    number = _float(text)
    if number is None or not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, such as 2.5")
    return number


def from_zero(text: str) -> float:
    """Read a number of at least 0 that ends somewhere."""
    number = _float(text)
    if number is None or not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0, such as 0.7")
    return number


def count(least: int, most: int | None = None) -> Callable[[str], int]:
    """Make a type for whole numbers of at least `least`, and at most `most`."""
    said = f"from {least} to {most:,}" if most is not None else f"of at least {least}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number {said}")
        return number

    return read


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
