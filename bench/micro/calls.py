"""What Python calls a decode step: `python -m bench.micro.calls` profiles turns of the generation loop at 128 rows.

The loop's own turns run in this thread under cProfile, with the real native step of SmolLM2-135M's shape (random
weights). Foreign calls, which cProfile does not see, are counted at the library's door by name. Exit status 1 where a
step takes more than one launch, or anything foreign beside its launch and its fence. State: none.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import sys
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.micro.step import SMOL, build
from zl.gpu.loop import GenerationLoop, StepResult
from zl.rows import Ticket
from zl.shapes import Shapes

PROMPT = 16
ROOM = 224  # tokens that a row may grow to: rows decode while others' prompts are still computed


class Door:
    """A native library that counts what is called in it."""

    def __init__(self, library: Any):
        self._library = library
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def counted(*args: Any) -> Any:
            self.calls[name] += 1
            return function(*args)

        return counted


class Found(NamedTuple):
    """foreign: calls of the library by name; profile: cProfile's table."""

    steps: int
    foreign: dict[str, int]
    profile: str


def profiled(step: Any, slots: list[Any], rows: int, prompt: int, steps: int, step_tokens: int = 512) -> Found:
    """Seat `rows` rows, let their prompts through, profile `steps` turns of the loop that only decode."""
    results: list[StepResult] = []
    control = np.zeros(rows, np.uint8)
    shapes = Shapes(max_rows=rows, step_tokens=step_tokens)
    loop = GenerationLoop(shapes, step, slots, control, results.append, _raise)
    for row in range(rows):
        loop.seat(Ticket(row, 1), None, prompt)
    while not results or len(results[-1].tickets) < rows:
        loop._turn()
    door = step._lib = Door(step._lib)
    before, profile = loop.counters.steps, cProfile.Profile()
    profile.enable()
    while loop.counters.steps < before + steps:
        loop._turn()
    profile.disable()
    step._lib = door._library
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("ncalls").print_stats(14)
    return Found(loop.counters.steps - before, dict(door.calls), text.getvalue())


def _raise(failure: BaseException) -> None:
    raise failure


def main() -> int:
    """Print the profile and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    step, slots, columns = build(args.rows, ROOM, 512, torch.bfloat16, 2, "auto", None)
    columns.prompt_len.fill(PROMPT)
    found = profiled(step, slots, args.rows, PROMPT, args.steps)
    step.close()
    print(found.profile)
    print(f"{SMOL.name}, {args.rows} rows, {found.steps} steps; foreign calls: {found.foreign}")
    return 0 if found.foreign == {"zl_launch": found.steps, "zl_wait": found.steps} else 1


if __name__ == "__main__":
    sys.exit(main())
