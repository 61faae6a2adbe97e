"""A step by stage beside its bound: `python -m bench.micro.roofline [--model FILE.gguf]`.

The bound of a stage is the larger of the bytes that it must read over the bandwidth, and its operations over the
matrix peak, both measured in this run, before and after, the better of the two. Weights count as the step reads them:
blocks of the file up to UNPACK_ROWS rows, bf16 above. Two bounds of the whole: the stages' sum, for stages follow one
another, and the lower one that a step without stages would have. Markdown on stdout, `--json` for the figures.
State: none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from bench.micro.step import UNPACK_ROWS, block_bits, build, run
from zl.gpu.native.step import STAGES
from zl.gpu.pinned import FIRST, SAMPLE
from zl.gpu.weights import open_model
from zl.shapes import ModelShape


def needs(shape: ModelShape, rows: int, tokens: int, bits: float) -> dict[str, tuple[float, float]]:
    """Bytes and operations of each stage that has some worth counting, for one decode step."""
    s = shape
    q, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    sizes = {
        "qkv": s.n_layers * s.hidden * (q + 2 * kv), "out": s.n_layers * q * s.hidden,
        "gate_up": s.n_layers * 2 * s.hidden * s.ffn, "down": s.n_layers * s.ffn * s.hidden, "head": s.vocab * s.hidden,
    }  # fmt: skip
    found = {name: (n * bits / 8, 2.0 * n * rows) for name, n in sizes.items()}
    cache = 2 * s.n_layers * kv * tokens * rows
    found["attention"] = (cache * 2, 2.0 * cache * s.n_heads / s.n_kv_heads)
    found["sample"] = (rows * s.vocab * 4, 0.0)
    return found


def machine(seconds: float) -> tuple[float, float]:
    """Measure bytes and operations a second in a process of its own."""
    command = [sys.executable, "-m", "bench.machine", "--seconds", str(seconds)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    speeds = found["measured"]
    return max(speeds["read_128MiB_bytes_per_s"], speeds["read_1GiB_bytes_per_s"]), speeds["gemm_bfloat16_flop_per_s"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,32,128,256")
    parser.add_argument("--tokens", type=int, default=200, help="context of each row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", type=Path, help="a GGUF file whose weights and blocks are used; else random bf16")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each of the machine's figures")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    counts = [int(n) for n in args.rows.split(",")]
    source = open_model(args.model) if args.model else None
    before = machine(args.seconds)
    step, slots, _ = build(max(counts), args.tokens, 512, torch.bfloat16, args.threads, "auto", source)
    for row in range(max(counts)):
        run(step, slots[0], [(row, 0, args.tokens, FIRST)])
    samples: dict[int, list[dict[str, float]]] = {n: [] for n in counts}
    for _ in range(args.rounds):
        for n in counts:
            samples[n].append(run(step, slots[0], [(r, args.tokens, 1, SAMPLE) for r in range(n)]))
    shape = step.shape
    step.close()
    bandwidth, peak = (max(pair) for pair in zip(before, machine(args.seconds), strict=True))
    print(f"{shape.name}, {args.threads} threads, {args.tokens} tokens of context; measured in this run: reads "
          f"{bandwidth / 1e9:.1f} GB/s, bf16 products {peak / 1e12:.2f} TFLOP/s. Milliseconds, median of {args.rounds} "
          "rounds, and the bound.\n")  # fmt: skip
    bounds = {
        n: {
            stage: 1e6 * max(n_bytes / bandwidth, flops / peak)
            for stage, (n_bytes, flops) in needs(
                shape, n, args.tokens, block_bits(source) if n <= UNPACK_ROWS else 16
            ).items()
        }
        for n in counts
    }
    medians = {n: {stage: float(np.median([s[stage] for s in samples[n]])) for stage in STAGES} for n in counts}
    print("| stage |" + "".join(f" {n} rows |" for n in counts))
    print("|---|" + "---:|" * len(counts))
    for stage in (s for s in STAGES if s != "total"):
        cells = [
            f" {medians[n][stage] / 1e3:.2f}" + (f" / {bounds[n][stage] / 1e3:.2f}" if stage in bounds[n] else "")
            for n in counts
        ]
        print(f"| {stage} |" + " |".join(cells) + " |")
    whole = {}
    for n in counts:
        wanted = needs(shape, n, args.tokens, block_bits(source) if n <= UNPACK_ROWS else 16).values()
        lowest = 1e6 * max(sum(b for b, _ in wanted) / bandwidth, sum(f for _, f in wanted) / peak)
        whole[n] = (medians[n]["total"], sum(bounds[n].values()), lowest)
    print("| **step** |" + "".join(f" {t / 1e3:.2f} / {b / 1e3:.2f} |" for t, b, _ in whole.values()))
    print("| times the stages' bound |" + "".join(f" {t / b:.2f} |" for t, b, _ in whole.values()))
    print("| times the lowest bound |" + "".join(f" {t / low:.2f} |" for t, _, low in whole.values()))
    if args.json:
        kept = {"bandwidth": bandwidth, "peak": peak, "us": medians, "bounds_us": bounds}
        args.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
