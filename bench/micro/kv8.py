"""What int8 keys and values cost in accuracy and save in time: `python -m bench.micro.kv8 chat | prose | speed`.

chat   The prompts of tests/data/chat.jsonl and 64 tokens of the bf16 program's greedy answers, token by token through
       three programs of the same weights: float32, bf16, and bf16 with int8 keys and values. All read the same tokens,
       so each position is compared under the same past.
prose  The same with pieces of 1,000 tokens of `--text`, scored from token 200 on.
speed  One step of bf16 and of int8 KV in alternating rounds of one process, over pools filled with random numbers.
State: none.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from bench.micro.step import FileWeights, build, run
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import FIRST, IGNORE_EOS, SAMPLE, RowColumns, StepSlot
from zl.gpu.weights import WeightSource, open_model
from zl.pull import locate
from zl.shapes import OWN, PAGE, Shapes, pages_for
from zl.text.prompt import PromptBuilder
from zl.text.tokenizer import TextModel, text_model

ROOT = Path(__file__).parent.parent.parent
KINDS = {"float32": ("float32", "auto"), "bf16": ("bfloat16", "auto"), "int8 KV": ("bfloat16", "int8")}
PAIRS = (("bf16", "int8 KV"), ("float32", "bf16"), ("float32", "int8 KV"))
ANSWER, WINDOW, SKIP = 64, 1_000, 200  # tokens of an answer; of a piece of prose, and of it read before the first score


class Reader:
    """One program reading given tokens: `ids` [rows, length], all rows at the same pace from `at` on."""

    def __init__(self, source: WeightSource, kind: str, rows: int, length: int, threads: int, level: str):
        dtype, kv = KINDS[kind]
        each = pages_for(length)
        sizes = Shapes(max_rows=rows, max_model_len=each * PAGE, n_pages=rows * each)
        self.columns, self.slots = RowColumns(sizes), [StepSlot(sizes), StepSlot(sizes)]
        self.columns.n_pieces.fill(1)
        self.columns.piece_source.fill(OWN)
        self.columns.prompt_len.fill(length)  # every token is read from the prompt, whatever was drawn
        self.columns.max_new.fill(1 << 30)
        self.columns.page_table[:] = np.arange(rows * each).reshape(rows, each)
        self.columns.penalty.fill(1.0)
        self.columns.row_flags.fill(IGNORE_EOS)
        weights = FileWeights(source, getattr(torch, dtype))
        blocks = source.blocks if dtype == "bfloat16" else None
        self.step = NativeStep(
            source.shape, weights, self.columns, self.slots, rows * each, 512, threads, level, blocks, kv
        )

    def prefill(self, row: int, n: int) -> None:
        """Read the first `n` tokens of a row."""
        for start in range(0, n, 512):
            run(self.step, self.slots[0], [(row, start, min(512, n - start), 0 if start else FIRST)])

    def read(self, at: Sequence[int]) -> np.ndarray:
        """Read each row's token at its position; logits, f32 [rows, vocab]."""
        run(self.step, self.slots[0], [(row, pos, 1, SAMPLE) for row, pos in enumerate(at)])
        found = self.step.logits()
        return np.stack([found[row] for row in range(len(at))])


class Score:
    """Sums over positions of what two programs say of the next token."""

    def __init__(self) -> None:
        self.n, self.difference, self.largest, self.kl, self.same = 0, 0.0, 0.0, 0.0, 0

    def add(self, a: np.ndarray, b: np.ndarray, log_a: np.ndarray, log_b: np.ndarray) -> None:
        """Take logits [rows, vocab] and their log probabilities."""
        apart = np.abs(a - b)
        self.n += len(a)
        self.difference += float(apart.mean(-1).sum())
        self.largest = max(self.largest, float(apart.max()))
        self.kl += float((np.exp(log_a) * (log_a - log_b)).sum())
        self.same += int((a.argmax(-1) == b.argmax(-1)).sum())

    def line(self) -> str:
        """Say it."""
        return (
            f"logits apart by {self.difference / self.n:.4f} on average, {self.largest:.2f} at most; KL "
            f"{self.kl / self.n:.6f} nats; same greedy token {100 * self.same / self.n:.2f}%"
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities, float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def compare(readers: dict[str, Reader], starts: list[int], steps: int, *, follow: bool) -> Iterator[str]:
    """Read `steps` tokens a row from `starts` on; follow: each next token is what bf16 finds likeliest."""
    for reader in readers.values():
        for row, start in enumerate(starts):
            reader.prefill(row, start)
    scores = {pair: Score() for pair in PAIRS}
    surprise, rows = dict.fromkeys(readers, 0.0), np.arange(len(starts))
    for i in range(steps):
        at = np.array(starts) + i
        logits = {name: reader.read(at.tolist()) for name, reader in readers.items()}
        logs = {name: log_softmax(found) for name, found in logits.items()}
        for (a, b), score in scores.items():
            score.add(logits[a], logits[b], logs[a], logs[b])
        if follow:
            for reader in readers.values():
                reader.step.prompt_ids[rows, at + 1] = logits["bf16"].argmax(-1)
        for name, reader in readers.items():
            surprise[name] -= float(logs[name][rows, reader.step.prompt_ids[rows, at + 1]].sum())
    for (a, b), score in scores.items():
        yield f"  {b} against {a}, {score.n} positions: {score.line()}"
    said = {name: np.exp(total / (steps * len(starts))) for name, total in surprise.items()}
    yield "  perplexity: " + ", ".join(f"{name} {value:.4f}" for name, value in said.items())


def prompts_of(text: TextModel) -> list[list[int]]:
    """Lay out the prompts of tests/data/chat.jsonl."""
    builder = PromptBuilder(text, Shapes())
    lines = (ROOT / "tests" / "data" / "chat.jsonl").read_text("utf-8").splitlines()
    asked = [json.loads(line) for line in lines]
    return [builder.build(a["system"].encode(), [m.encode() for m in a["messages"]]).ids for a in asked]


def accuracy(args: argparse.Namespace) -> None:
    """Print what the programs say of given tokens."""
    source = open_model(args.model)
    text = text_model(source)
    if chat := args.what == "chat":
        rows = prompts_of(text)
        starts, steps, length = [len(ids) - 1 for ids in rows], ANSWER, max(map(len, rows)) + ANSWER + 1
    else:
        prose = text.tokenizer.encode("\n".join(path.read_text("utf-8") for path in args.text)).ids
        rows = [prose[at : at + WINDOW] for at in range(0, len(prose) - WINDOW + 1, WINDOW)][: args.pieces]
        starts, steps, length = [SKIP] * len(rows), WINDOW - SKIP - 1, WINDOW
    readers = {kind: Reader(source, kind, len(rows), length, args.threads, args.level) for kind in KINDS}
    for reader in readers.values():
        for row, ids in enumerate(rows):
            reader.columns.own_ids[row, : len(ids)] = ids
    print(f"{args.what}: {source.shape.name}, {len(rows)} rows, {readers['bf16'].step.name}", flush=True)
    for line in compare(readers, starts, steps, follow=chat):
        print(line, flush=True)
    for reader in readers.values():
        reader.step.close()


def fill(step: NativeStep) -> None:
    """Fill a pool with random numbers of the size of keys and values."""
    pool = step.pool()[0]
    rng = np.random.default_rng(0)
    row = pool.shape[-1]  # of a page and head
    if step.kv == "int8":
        block = rng.integers(-127, 128, (64, row), dtype=np.int8)
        block.view(np.uint16)[:, : 2 * PAGE] = 0x3C00  # scales of 1/128
    else:
        block = torch.randn(64, row).bfloat16().view(torch.int16).numpy().view(np.uint16)
    flat = pool.reshape(-1, row)
    for at in range(0, len(flat), 64):
        flat[at : at + 64] = block[: len(flat) - at]


def speed(args: argparse.Namespace) -> None:
    """Print a step's time and that of its attention, bf16 and int8 KV side by side."""
    rows, tokens = ([int(n) for n in text.split(",")] for text in (args.rows, args.tokens))
    source = open_model(args.model)
    engines = {}
    for kv in ("auto", "int8"):
        engine = build(max(rows), max(tokens), 512, torch.bfloat16, args.threads, args.level, source, kv)
        fill(engine[0])
        engines[kv] = engine
    cases = [(n, t) for t in tokens for n in rows]
    took: dict[tuple[str, int, int], list[dict[str, float]]] = {(kv, *c): [] for kv in engines for c in cases}
    for turn in range(args.rounds + 1):
        for n, t in cases:
            for kv, (step, slots, _) in list(engines.items())[:: 1 if turn % 2 else -1]:
                times = run(step, slots[0], [(row, t, 1, SAMPLE) for row in range(n)])
                if turn:
                    took[kv, n, t].append(times)
    print(f"{engines['auto'][0].name}, {args.threads} threads, {args.rounds} alternating rounds; ms: the least, "
          "ratio: the median of the rounds")  # fmt: skip
    print("rows  tokens   step bf16   int8 KV   ratio   attention bf16   int8 KV   ratio")
    for n, t in cases:
        cells = []
        for stage in ("total", "attention"):
            a, b = (np.array([x[stage] for x in took[kv, n, t]]) / 1e3 for kv in ("auto", "int8"))
            cells += [a.min(), b.min(), np.median(b / a)]
        print(f"{n:4} {t:7} {cells[0]:11.2f} {cells[1]:9.2f} {cells[2]:7.2f} {cells[3]:16.2f} {cells[4]:9.2f} "
              f"{cells[5]:7.2f}")  # fmt: skip
    for kv, (step, _, _) in engines.items():
        print(f"KV pool, {'bf16' if kv == 'auto' else kv}: {step.memory['kv_pool'] / 2**20:.1f} MiB")
        step.close()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("chat", "prose", "speed"))
    parser.add_argument("--model", type=Path, default=locate("smollm2-135m-instruct"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--level", default="auto")
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / "docs" / "scaling.md"])
    parser.add_argument("--pieces", type=int, default=4, help="how many")
    parser.add_argument("--rows", default="1,32,128")
    parser.add_argument("--tokens", default="200,1000")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    speed(args) if args.what == "speed" else accuracy(args)


if __name__ == "__main__":
    main()
