"""The penalty filter's two kinds, measured: `python -m bench.micro.bloom`.

Of the Bloom filter, tokens of the vocabulary that it takes for seen though they are not, by the number of distinct
tokens seen, for uniform ids, for ids by Zipf's law and, with `--model FILE.gguf --text FILE...`, for real text. Of both
kinds, what building, reading and updating costs beside a native step; they take turns in one process. The filters are
the product's (zl.sampling.filter). State: none.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from zl.sampling.filter import BLOOM_WORDS, HASHES, KINDS, Filter

PENALTY = {"on": 1.1, "off": 1.0, "first": 1.1}


def falsely_seen(ids: np.ndarray, vocab: int) -> int:
    """Count the ids that a filter of these distinct ids takes for seen wrongly."""
    form = Filter("bloom", vocab)
    row = np.zeros((1, form.words), np.uint32)
    form.add(row[0], ids)
    return int(np.unpackbits(form.bitmaps(row).view(np.uint8)).sum()) - len(ids)


def distinct(ids: Sequence[int], n_seen: int) -> Iterator[np.ndarray]:
    """Cut a text's ids into runs of `n_seen` distinct ones each."""
    seen: set[int] = set()
    for token in ids:
        seen.add(token)
        if len(seen) == n_seen:
            yield np.array(sorted(seen))
            seen.clear()


def real_text(model: Path, files: Sequence[Path]) -> tuple[list[int], int]:
    """Tokenize files, one after another; returns the ids and the vocabulary's size."""
    from zl.gpu.weights import open_model
    from zl.text.tokenizer import text_model

    source = open_model(model)
    text = "\n".join(file.read_text("utf-8", "replace") for file in files)
    return list(text_model(source).tokenizer.encode(text).ids), source.shape.vocab


def expected(n_seen: int, vocab: int) -> float:
    """Compute the textbook expectation: (1 - (1 - 1/m)^(k n))^k of the ids not seen."""
    k = len(HASHES)
    return (vocab - n_seen) * (1 - (1 - 1 / (32 * BLOOM_WORDS)) ** (k * n_seen)) ** k


def costs(rows: int, tokens: int, rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Time native steps of each kind, in turns; the least of all rounds, in microseconds.

    read    what the sampler takes longer where penalties are on: reading the filter and applying it
    build   what a step takes longer whose rows all begin in it: clearing and filling every filter
    total   a decode step of all rows
    """
    import torch

    from bench.micro.step import build, run
    from zl.gpu.pinned import FIRST, SAMPLE

    made = {kind: build(rows, tokens, 512, torch.bfloat16, threads, "auto", None, "auto", kind) for kind in KINDS}
    per = max(1, 512 // tokens)
    for step, slots, _ in made.values():
        for first in range(0, rows, per):
            run(step, slots[0], [(row, 0, tokens, FIRST) for row in range(first, min(first + per, rows))])
    least: dict[tuple[str, str], dict[str, float]] = {}
    for turn in range(rounds):
        for kind, (step, slots, columns) in list(made.items())[:: 1 if turn % 2 else -1]:
            for case, penalty in PENALTY.items():
                columns.penalty.fill(penalty)
                flags = SAMPLE | FIRST * (case == "first")
                times = run(step, slots[0], [(row, tokens, 1, flags) for row in range(rows)])
                best = least.setdefault((kind, case), times)
                least[kind, case] = {stage: min(best[stage], time) for stage, time in times.items()}
    for step, _, _ in made.values():
        step.close()
    return {
        kind: {
            "read": least[kind, "on"]["sample"] - least[kind, "off"]["sample"],
            "build": least[kind, "first"]["embed"] - least[kind, "on"]["embed"],
            "total": least[kind, "on"]["total"],
        }
        for kind in KINDS
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.micro.bloom", description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--model", type=Path, help="a GGUF file whose tokenizer reads --text")
    parser.add_argument("--text", type=Path, nargs="+", help="files; counted where the model's vocabulary is")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=128, help="of the step that the filters are timed in; 0: not timed")
    parser.add_argument("--tokens", type=int, default=24, help="prompt tokens of each row")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    rng = np.random.default_rng(1)
    text, text_vocab = real_text(args.model, args.text) if args.text else ([], 0)
    for vocab in args.vocab:
        sizes = ", ".join(f"{kind} {Filter(kind, vocab).words / 256:.1f} KiB" for kind in KINDS)
        print(f"vocabulary {vocab:,}, of a row: {sizes}")
        zipf = 1 / (np.arange(vocab) + 10.0)
        for n_seen in (100, 500, 1_000, 2_000, 4_000):
            sets = {
                name: [rng.choice(vocab, n_seen, replace=False, p=weights) for _ in range(args.rounds)]
                for name, weights in (("uniform", None), ("Zipf", zipf / zipf.sum()))
            }
            if vocab == text_vocab:
                sets["text"] = list(distinct(text, n_seen))
            found = {name: [falsely_seen(ids, vocab) for ids in each] for name, each in sets.items() if each}
            said = ", ".join(f"{name} {np.mean(counts):.1f}, at most {max(counts)}" for name, counts in found.items())
            print(f"  {n_seen:5,} distinct tokens seen, falsely penalised: {said}; by the formula "
                  f"{expected(n_seen, vocab):.1f}")  # fmt: skip
    if args.rows:
        for kind, cost in costs(args.rows, args.tokens, 4 * args.rounds, args.threads).items():
            print(f"{kind} in a native step of {args.rows} rows ({cost['total']:.0f} us), vocabulary 49,152:")
            print(f"  read and applied: {cost['read']:.0f} us, {100 * cost['read'] / cost['total']:.2f}% of the step")
            print(f"  built for all rows at once: {cost['build']:.0f} us, {100 * cost['build'] / cost['total']:.2f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
