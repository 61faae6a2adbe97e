"""What determinism costs: each stage beside a library that may choose by shape: `python -m bench.micro.free`.

zl's products and attention keep one order of sums for every row count. oneDNN's bf16 product with weights packed for
that very row count, and torch's attention, over the same shapes and the same number of bytes (all layers' weights, a KV
of its own for each layer), owe nothing to anybody: they may split sums by size. In every round both run at every row
count, in one process. The free variant takes for each stage the faster of the two; "cost" is what the step loses
against it. Sampling's share of the step is shown too. Random weights of SmolLM2-135M's shape; bf16. State: none.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.micro.step import SMOL, build, prefill, run
from zl.gpu.pinned import SAMPLE

PRODUCTS = {"qkv": "qkv", "wo": "out", "gate and up": "gate_up", "down": "down", "head": "head"}
"""What is timed: the native step's names of it."""


def products(threads: int) -> dict[str, list[torch.Tensor]]:
    """Weights of each product, one a layer, bf16 [n, k]."""
    torch.set_num_threads(threads)
    s = SMOL
    q, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    sizes = {
        "qkv": (s.hidden, q + 2 * kv), "wo": (q, s.hidden), "gate and up": (s.hidden, 2 * s.ffn),
        "down": (s.ffn, s.hidden), "head": (s.hidden, s.vocab),
    }  # fmt: skip
    return {
        name: [(torch.randn(n, k) * k**-0.5).bfloat16() for _ in range(1 if name == "head" else s.n_layers)]
        for name, (k, n) in sizes.items()
    }


def timed(work: Callable[[], object]) -> float:
    """Microseconds of one call."""
    begun = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begun) / 1e3


def library(weights: dict[str, list[torch.Tensor]], rows: int, tokens: int) -> dict[str, Callable[[], None]]:
    """The library's way through each stage of all layers at a row count."""
    s = SMOL
    acts = {name: torch.randn(rows, found[0].shape[1]).bfloat16() for name, found in weights.items()}
    reorder, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    packed = {name: [reorder(weight, rows) for weight in found] for name, found in weights.items()}
    query = torch.randn(rows, s.n_heads, 1, s.head_dim).bfloat16()
    caches = [torch.randn(2, rows, s.n_kv_heads, tokens, s.head_dim).bfloat16() for _ in range(s.n_layers)]

    def multiply(name: str) -> Callable[[], None]:
        def work() -> None:
            for weight in packed[name]:
                linear(acts[name], weight, None, "none", [], "")

        return work

    def attend() -> None:
        for keys, values in caches:
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return {**{name: multiply(name) for name in weights}, "attention": attend}


def main() -> None:
    """Measure and print the table; `--json` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,32,128,256")
    parser.add_argument("--tokens", type=int, default=200, help="context of each row")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    counts = [int(n) for n in args.rows.split(",")]
    step, slots, _ = build(max(counts), args.tokens, 512, torch.bfloat16, args.threads, "auto", None)
    prefill(step, slots[0], max(counts), args.tokens)
    weights = products(args.threads)
    theirs = {n: library(weights, n, args.tokens) for n in counts}
    found: dict[int, dict[str, list[float]]] = {n: {} for n in counts}
    for number in range(args.rounds + 1):
        for n in counts:
            ours = run(step, slots[0], [(r, args.tokens, 1, SAMPLE) for r in range(n)])
            taken = {f"zl {stage}": ours[name] for stage, name in (*PRODUCTS.items(), ("attention", "attention"))}
            taken |= {f"library {stage}": timed(work) for stage, work in theirs[n].items()}
            taken |= {"zl step": ours["total"], "zl sampling": ours["sample"]}
            if number:  # the first round warms up
                for name, value in taken.items():
                    found[n].setdefault(name, []).append(value)
    step.close()
    medians = {n: {name: float(np.median(values)) for name, values in f.items()} for n, f in found.items()}
    stages = [*PRODUCTS, "attention"]
    print(f"{args.threads} threads, {args.tokens} tokens of context, medians of {args.rounds} rounds, ms: zl / library")
    print("rows".ljust(6) + "".join(f"{stage:>18}" for stage in stages) + "    step    free  cost  sampling")
    for n, m in medians.items():
        free = m["zl step"] - sum(max(0.0, m[f"zl {s}"] - m[f"library {s}"]) for s in stages)
        m["cost"], m["sampling share"] = m["zl step"] / free - 1, m["zl sampling"] / m["zl step"]
        pairs = [f"{m[f'zl {s}'] / 1e3:.2f} / {m[f'library {s}'] / 1e3:.2f}" for s in stages]
        print(
            f"{n:<6}" + "".join(f"{pair:>18}" for pair in pairs)
            + f"{m['zl step'] / 1e3:8.2f}{free / 1e3:8.2f}{m['cost']:6.1%}{m['sampling share']:10.1%}"
        )  # fmt: skip
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items()}
        args.json.write_text(json.dumps({"settings": settings, "us": medians}, indent=1))


if __name__ == "__main__":
    main()
