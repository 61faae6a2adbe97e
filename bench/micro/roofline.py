"""A step by stage beside its bound: `python -m bench.micro.roofline [--model FILE.gguf]`.

The bound of a stage is the larger of the bytes that it must read over the bandwidth, and its operations over the
matrix peak. Both change by the second here, so each is measured in every round, beside the steps: torch reads arrays;
torch multiplies matrices and, where there are tiles, bare tile products run on all cores: the faster is the peak.
Weights count as the step reads them: blocks of the file up to UNPACK_ROWS rows, bf16 above. Two bounds of the whole:
the stages' sum, for stages follow one another, and the lower one that a step without stages would have. Markdown on
stdout, `--json` for the figures. State: none.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.micro import tiles
from bench.micro.step import UNPACK_ROWS, block_bits, build, prefill, run
from zl.gpu.native.build import compiler, runs
from zl.gpu.native.step import STAGES
from zl.gpu.pinned import SAMPLE
from zl.gpu.weights import open_model
from zl.shapes import ModelShape


def needs(shape: ModelShape, rows: int, tokens: int, bits: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """Bytes and operations of each stage that has some worth counting, for one decode step.

    bits  of a weight of the layers and of the head
    """
    s = shape
    q, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    sizes = {
        "qkv": s.n_layers * s.hidden * (q + 2 * kv), "out": s.n_layers * q * s.hidden,
        "gate_up": s.n_layers * 2 * s.hidden * s.ffn, "down": s.n_layers * s.ffn * s.hidden, "head": s.vocab * s.hidden,
    }  # fmt: skip
    found = {name: (n * bits[name == "head"] / 8, 2.0 * n * rows) for name, n in sizes.items()}
    cache = 2 * s.n_layers * kv * tokens * rows
    found["attention"] = (cache * 2, 2.0 * cache * s.n_heads / s.n_kv_heads)
    found["sample"] = (rows * s.vocab * 4, 0.0)
    return found


TILES_S = 0.05
SMALL_BYTES = 96 << 20
"""About what a step of one row reads of the embedded model."""


class Machine:
    """What the machine does now: one short measurement at a time, between the steps."""

    def __init__(self, threads: int, n_bytes: int, size: int, folder: Path):
        torch.set_num_threads(threads)
        self._cpus = sorted(os.sched_getaffinity(0))[:threads]
        self._tiles = tiles.build(folder) if runs("amx") and compiler() else None
        self._large, self._small = torch.ones(n_bytes // 4), torch.ones(SMALL_BYTES // 4)
        self._left, self._right = (torch.randn(size, size).to(torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._left)

    def bandwidth(self) -> float:
        """Measure bytes read a second: of an array out of the caches' reach, or of one that has just been read."""
        self._small.sum()
        return max(data.nbytes / self._seconds(data.sum) for data in (self._small, self._large))

    def peak(self) -> float:
        """Measure bf16 operations a second."""
        library = 2 * len(self._left) ** 3 / self._seconds(lambda: torch.mm(self._left, self._right, out=self._out))
        return max(library, tiles.peak(self._tiles, self._cpus, TILES_S) if self._tiles else 0.0)

    @staticmethod
    def _seconds(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


def bounds_us(wanted: dict[str, tuple[float, float]], bandwidth: float, peak: float) -> dict[str, float]:
    """Give the bound of each stage, and as "lowest" that of a step without stages."""
    stages = {name: 1e6 * max(n_bytes / bandwidth, flops / peak) for name, (n_bytes, flops) in wanted.items()}
    n_bytes, flops = (sum(pair[i] for pair in wanted.values()) for i in (0, 1))
    return stages | {"step": sum(stages.values()), "lowest": 1e6 * max(n_bytes / bandwidth, flops / peak)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,32,128,256")
    parser.add_argument("--tokens", type=int, default=200, help="context of each row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", type=Path, help="a GGUF file whose weights and blocks are used; else random bf16")
    parser.add_argument("--read-mib", type=int, default=512, help="array that is read for the bandwidth")
    parser.add_argument("--product", type=int, default=1_536, help="size of torch's matrices for the peak")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    counts = [int(n) for n in args.rows.split(",")]
    source = open_model(args.model) if args.model else None
    folder = tempfile.TemporaryDirectory()
    machine = Machine(args.threads, args.read_mib << 20, args.product, Path(folder.name))
    step, slots, _ = build(max(counts), args.tokens, 512, torch.bfloat16, args.threads, "auto", source)
    prefill(step, slots[0], max(counts), args.tokens)
    shape, bits = step.shape, block_bits(source)
    wanted = {n: needs(shape, n, args.tokens, bits if n <= UNPACK_ROWS else (16, 16)) for n in counts}
    samples: dict[int, list[dict[str, float]]] = {n: [] for n in counts}
    speeds: list[tuple[float, float]] = []
    for _ in range(args.rounds):
        speeds.append((machine.bandwidth(), machine.peak()))
        run(step, slots[0], [(0, args.tokens, 1, SAMPLE)])  # not counted: the library's threads spin on for a while
        for n in counts:
            samples[n].append(run(step, slots[0], [(r, args.tokens, 1, SAMPLE) for r in range(n)]))
    step.close()
    bandwidth, peak = np.median(speeds, axis=0)
    best = np.max(speeds, axis=0)
    print(f"{shape.name}, {args.threads} threads, {args.tokens} tokens of context. Measured in each of {args.rounds} "
          f"rounds, median (best): reads {bandwidth / 1e9:.1f} ({best[0] / 1e9:.1f}) GB/s, bf16 products "
          f"{peak / 1e12:.2f} ({best[1] / 1e12:.2f}) TFLOP/s. Milliseconds: median of the rounds, and the bound by the "
          "medians.\n")  # fmt: skip
    medians = {n: {stage: float(np.median([s[stage] for s in samples[n]])) for stage in STAGES} for n in counts}
    bounds = {n: bounds_us(wanted[n], bandwidth, peak) for n in counts}
    print("| stage |" + "".join(f" {n} rows |" for n in counts))
    print("|---|" + "---:|" * len(counts))
    for stage in (s for s in STAGES if s != "total"):
        cells = [
            f" {medians[n][stage] / 1e3:.2f}" + (f" / {bounds[n][stage] / 1e3:.2f}" if stage in bounds[n] else "")
            for n in counts
        ]
        print(f"| {stage} |" + " |".join(cells) + " |")
    totals = [f" {medians[n]['total'] / 1e3:.2f} / {bounds[n]['step'] / 1e3:.2f} |" for n in counts]
    print("| **step** |" + "".join(totals))
    for name, about in (("step", "the stages' bound"), ("lowest", "the lowest bound")):
        cells = []
        for n in counts:
            rounds = [s["total"] / bounds_us(wanted[n], *v)[name] for s, v in zip(samples[n], speeds, strict=True)]
            low, mid, high = np.percentile(rounds, (10, 50, 90))
            cells.append(f" {mid:.2f} ({low:.2f} to {high:.2f}) |")
        print(f"| times {about}, round by round |" + "".join(cells))
    strict = [medians[n]["total"] / bounds_us(wanted[n], *best)["step"] for n in counts]
    print("| median step over the stages' bound by the best of all rounds |" + "".join(f" {r:.2f} |" for r in strict))
    if args.json:
        kept = {"speeds": speeds, "us": samples, "bounds_us": bounds}
        args.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
