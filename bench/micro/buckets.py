"""What padding a step would cost on the CPU: `python -m bench.micro.buckets [--model FILE.gguf]`.

Row counts around the tiles' edges take turns in every round of one process; of the matrix products (which is where
padding would cost: attention and sampling run a row at a time) the least time of each count is kept, since a busy
machine only ever adds. Beside each: what it would take padded to the next tile of 16 rows, and to the next of
`shapes.TOKEN_BUCKETS`, which the CUDA program needs and the CPU's does without. State: none.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.micro.step import build, prefill, run
from zl.gpu.pinned import SAMPLE
from zl.gpu.weights import open_model
from zl.shapes import TOKEN_BUCKETS

TILE = 16
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
"""The stages that padding would lengthen."""


def padded(rows: int, tile: int = TILE) -> tuple[int, int]:
    """Give the rows of the next whole tile, and of the narrowest bucket that holds them."""
    return -(-rows // tile) * tile, next(bucket for bucket in TOKEN_BUCKETS if bucket >= rows)


def table(least: Mapping[int, float]) -> list[str]:
    """Make the Markdown table of times in microseconds by row count; padded counts must be among them."""
    lines = ["| rows | products, ms | padded to its tile | padded to its bucket |", "|---:|---:|---:|---:|"]
    for rows, took in least.items():
        tile, bucket = padded(rows)
        cells = (f"{n}: {least[n] / took - 1:+.0%}" if n != rows else "–" for n in (tile, bucket))
        lines.append(f"| {rows} | {took / 1e3:.2f} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,5,15,16,17,31,32,33,48,64,65,128")
    parser.add_argument("--tokens", type=int, default=16, help="context of each row")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", type=Path, help="a GGUF file whose weights and blocks are used; else random bf16")
    args = parser.parse_args()
    counts = {int(n) for n in args.rows.split(",")}
    counts |= {n for rows in counts for n in padded(rows)}
    source = open_model(args.model) if args.model else None
    step, slots, _ = build(max(counts), args.tokens, 512, torch.bfloat16, args.threads, "auto", source)
    prefill(step, slots[0], max(counts), args.tokens)
    least = dict.fromkeys(sorted(counts), float("inf"))
    for _ in range(args.rounds):
        for rows in least:
            times = run(step, slots[0], [(row, args.tokens, 1, SAMPLE) for row in range(rows)])
            least[rows] = min(least[rows], sum(times[stage] for stage in PRODUCTS))
    print(f"{step.name}, {args.threads} threads; least of {args.rounds} rounds\n")
    print("\n".join(table(least)))
    step.close()


if __name__ == "__main__":
    main()
