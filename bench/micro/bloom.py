"""The repetition filter's two forms, measured: `python -m bench.micro.bloom`.

A 4 KB Bloom filter with 4 hashes: tokens of the vocabulary that it takes for seen though they are not, by the number of
distinct tokens seen. An exact bitmap: its bytes a row, and what building, reading and updating it costs beside a step.
Hash functions: the upper bits of the id times an odd 32-bit constant, one constant a hash. State: none.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import numpy as np

FILTER_BITS = 4_096 * 8
HASHES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


def places(ids: np.ndarray) -> np.ndarray:
    """Hash token ids, uint32 [n], to bits of the filter: int64 [n, 4]."""
    products = ids[:, None].astype(np.uint32) * np.array(HASHES, np.uint32)
    return (products >> np.uint32(32 - 15)).astype(np.int64)


def falsely_seen(n_seen: int, vocab: int, rng: np.random.Generator) -> int:
    """Count the ids that a filter of `n_seen` distinct random ids takes for seen wrongly."""
    seen = rng.choice(vocab, n_seen, replace=False)
    bits = np.zeros(FILTER_BITS, np.bool_)
    bits[places(seen)] = True
    hits = bits[places(np.arange(vocab))].all(1)
    return int(hits.sum()) - n_seen


def expected(n_seen: int, vocab: int) -> float:
    """Compute the textbook expectation: (1 - (1 - 1/m)^(k n))^k of the ids not seen."""
    k = len(HASHES)
    return (vocab - n_seen) * (1 - (1 - 1 / FILTER_BITS) ** (k * n_seen)) ** k


def bitmap_cost(rows: int, tokens: int, rounds: int, threads: int) -> dict[str, float]:
    """Time native steps with and without the bitmap, in turns; the least of all rounds, in microseconds.

    read    what the sampler takes longer where penalties are on: reading the bitmap and applying it
    build   what a step takes longer whose rows all begin in it: clearing and filling every bitmap
    total   a decode step of all rows
    """
    import torch

    from bench.micro.step import build, run
    from zl.gpu.pinned import FIRST, SAMPLE

    step, slots = build(rows, tokens, 512, torch.bfloat16, threads, "auto", None)
    columns = step._keep[0]
    per = max(1, 512 // tokens)
    for first in range(0, rows, per):
        run(step, slots[0], [(row, 0, tokens, FIRST) for row in range(first, min(first + per, rows))])
    found: dict[str, list[dict[str, float]]] = {"on": [], "off": [], "first": []}
    for _ in range(rounds):
        for kind, penalty, flags in (("on", 1.1, SAMPLE), ("off", 1.0, SAMPLE), ("first", 1.1, SAMPLE | FIRST)):
            columns.penalty.fill(penalty)
            found[kind].append(run(step, slots[0], [(row, tokens, 1, flags) for row in range(rows)]))

    def least(kind: str, stage: str) -> float:
        return min(times[stage] for times in found[kind])

    step.close()
    return {
        "read": least("on", "sample") - least("off", "sample"),
        "build": least("first", "embed") - least("on", "embed"),
        "total": least("on", "total"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.micro.bloom", description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=128, help="of the step that the bitmap is timed in; 0: not timed")
    parser.add_argument("--tokens", type=int, default=24, help="prompt tokens of each row")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    rng = np.random.default_rng(1)
    for vocab in args.vocab:
        print(f"vocabulary {vocab:,}: exact bitmap {-(-vocab // 32) * 4 / 1024:.1f} KiB a row, Bloom filter 4 KiB")
        for n_seen in (100, 500, 1_000, 2_000, 4_000):
            counts = [falsely_seen(n_seen, vocab, rng) for _ in range(args.rounds)]
            print(
                f"  {n_seen:5,} distinct tokens seen: {np.mean(counts):8.1f} falsely penalised, at most {max(counts)}; "
                f"by the formula {expected(n_seen, vocab):.1f}"
            )
    if args.rows:
        cost = bitmap_cost(args.rows, args.tokens, 4 * args.rounds, args.threads)
        print(f"exact bitmap in a native step of {args.rows} rows ({cost['total']:.0f} us), vocabulary 49,152:")
        print(f"  read and applied: {cost['read']:.0f} us, {100 * cost['read'] / cost['total']:.2f}% of the step")
        print(f"  built for all rows at once: {cost['build']:.0f} us, {100 * cost['build'] / cost['total']:.2f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
