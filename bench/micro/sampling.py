"""Time the end of a step, head product and sampling: `python -m bench.micro.sampling MODEL.gguf`.

Rows hold chat prompts, so the logits are a model's own; one decode step is run again and again. With `--against OTHER`,
two compiled libraries of one interface (two builds found in the cache folder) take turns step by step in one process,
so that a slow moment of the machine hits both alike; the tokens they draw are counted as equal or not. With `--bloom`
the other one is this build with the penalty's Bloom filter. State: none.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench.micro.step import FileWeights, run
from zl.gpu.native.build import library, pick_level
from zl.gpu.native.packed import Packed
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import FIRST, IGNORE_EOS, LOGPROBS, SAMPLE, RowColumns, StepSlot
from zl.gpu.weights import WeightSource, open_model
from zl.sampling.profiles import PROFILES
from zl.shapes import PAGE, Shapes, pages_for
from zl.text.tokenizer import text_model
from zl.tools.prompts import burst

STAGES = ("head", "sample", "total")
SETTINGS = {
    **{p.name: (p.temperature, p.top_p, p.penalty, False) for p in PROFILES.values()},
    "generic": (0.71, 0.95, 1.1, False),
    "no top-p": (1.0, 1.0, 1.0, False),
    "greedy": (0.0, 1.0, 1.0, False),
    "logprobs": (0.7, 0.95, 1.1, True),
}
"""Temperature, top-p, penalty, log probabilities."""


class Engine(NamedTuple):
    """One library over the rows."""

    step: NativeStep
    slots: list[StepSlot]
    columns: RowColumns


def prompts(source: WeightSource, rows: int, words: int) -> list[list[int]]:
    """Tokenize chat prompts, one a row."""
    tokenizer = text_model(source).tokenizer
    made = []
    for one in burst(rows, 64, 1, words):
        turns = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in one.chat())
        made.append(list(tokenizer.encode(turns + "<|im_start|>assistant\n").ids))
    return made


def open_engine(weights: Packed, source: WeightSource, ids: list[list[int]], threads: int, kind: str) -> Engine:
    """Open a library's step and compute the prompts."""
    rows, longest = len(ids), max(map(len, ids))
    each = pages_for(longest + PAGE)
    sizes = Shapes(max_rows=rows, max_model_len=each * PAGE, n_pages=rows * each)
    columns, slots = RowColumns(sizes), [StepSlot(sizes), StepSlot(sizes)]
    for row, one in enumerate(ids):
        columns.put_ids(row, one)
    columns.max_new.fill(1 << 30)
    columns.page_table[:] = np.arange(rows * each).reshape(rows, each)
    columns.seed[:] = np.arange(rows)
    step = NativeStep(source.shape, weights, columns, slots, rows * each, 512, threads, penalty_filter=kind)
    engine = Engine(step, slots, columns)
    settle(engine, SETTINGS["CHAT"])
    for row, one in enumerate(ids):
        run(step, slots[0], [(row, 0, len(one), FIRST | SAMPLE)])
    return engine


def settle(engine: Engine, settings: tuple[float, float, float, bool]) -> None:
    """Give all rows the same settings."""
    columns = engine.columns
    columns.temperature.fill(settings[0])
    columns.top_p.fill(settings[1])
    columns.penalty.fill(settings[2])
    columns.row_flags.fill(IGNORE_EOS | LOGPROBS * settings[3])


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--library", type=Path, help="the library to time, in place of this build's")
    parser.add_argument("--against", type=Path, help="another build's library, taken in turns with this one's")
    parser.add_argument("--bloom", action="store_true", help="take turns with the Bloom filter")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    source, level = open_model(args.model), pick_level()
    ids = prompts(source, args.rows, args.words)
    this = args.library or library(level)
    others = [("other", args.against, "exact")] * bool(args.against) + [("bloom", this, "bloom")] * args.bloom
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        longest = pages_for(max(map(len, ids)) + PAGE) * PAGE
        sizes = Shapes(max_rows=1, max_model_len=longest)  # packed rope tables are that long
        first = NativeStep(
            source.shape, FileWeights(source, torch.bfloat16), RowColumns(sizes), [StepSlot(sizes), StepSlot(sizes)],
            1, 2, args.threads, level, source.blocks,
        )  # fmt: skip
        first.export(path)
        first.close()
        engines = {
            name: open_engine(Packed(path, lib, level, "bfloat16"), source, ids, args.threads, kind)
            for name, lib, kind in [("this", this, "exact"), *others]
        }
    plan = [(row, len(one), 1, SAMPLE) for row, one in enumerate(ids)]
    print(f"{args.rows} rows, {args.threads} threads, {level}; microseconds: median (least)")
    for name in args.settings.split(","):
        times: dict[str, list[list[float]]] = {engine: [] for engine in engines}
        same = drawn = 0
        for engine in engines.values():
            settle(engine, SETTINGS[name])
        for i in range(args.rounds):
            for key in list(engines)[:: 1 if i % 2 else -1]:
                found = run(engines[key].step, engines[key].slots[0], plan)
                times[key].append([found[stage] for stage in STAGES])
            tokens = [engine.slots[0].out_token[: args.rows] for engine in engines.values()]
            same, drawn = same + int((tokens[0] == tokens[-1]).sum()), drawn + args.rows
        for key, taken in times.items():
            table = np.array(taken)
            cells = (
                f"{stage} {np.median(table[:, i]):7.0f} ({table[:, i].min():6.0f})" for i, stage in enumerate(STAGES)
            )
            print(f"{name:>9} {key:>6}: {'  '.join(cells)}  sampling {np.median(table[:, -2] / table[:, -1]):.1%}")
        print(f"{'':>9} {'':>6}  equal tokens: {same} of {drawn}")
    for engine in engines.values():
        engine.step.close()


if __name__ == "__main__":
    main()
