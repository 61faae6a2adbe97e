"""Time one native step by stage, beside its bounds: `python -m bench.micro.step [--rows 1,16,...] [--tokens 200]`.

Random weights of SmolLM2-135M's shape, or those of `--model FILE.gguf` (blocks included); rows sit at about `--tokens`
tokens of context. All row counts, and a prompt chunk of `--prefill` tokens, take turns in every round of one process,
so that a slow moment of the machine hits them alike; median and tenth percentile are shown.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from zl.gpu.native.step import STAGES, NativeStep
from zl.gpu.pinned import FIRST, IGNORE_EOS, SAMPLE, RowColumns, StepSlot
from zl.gpu.weights import WeightSource, open_model
from zl.shapes import PAGE, ModelShape, Shapes, pages_for

SMOL = ModelShape(
    "random SmolLM2-135M", n_layers=30, hidden=576, n_heads=9, n_kv_heads=3, head_dim=64, ffn=1536, vocab=49_152,
    max_position=2048, rms_eps=1e-5, rope_theta=10_000.0,
)  # fmt: skip


UNPACK_ROWS = 32  # kUnpackRows of zl/gpu/native/blocks.hpp


class RandomWeights(dict[str, torch.Tensor]):
    """Tensors made when asked for, so that only the packed copy stays in memory."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype):
        super().__init__()
        self.shape, self.dtype = shape, dtype

    def __contains__(self, name: object) -> bool:
        return not str(name).rsplit(".", 1)[-1].startswith("b")

    def __missing__(self, name: str) -> torch.Tensor:
        s, part = self.shape, name.rsplit(".", 1)[-1]
        q, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
        size: Sequence[int] = {
            "embed": (s.vocab, s.hidden), "head": (s.vocab, s.hidden), "wq": (q, s.hidden), "wk": (kv, s.hidden),
            "wv": (kv, s.hidden), "wo": (s.hidden, q), "w_gate": (s.ffn, s.hidden), "w_up": (s.ffn, s.hidden),
            "w_down": (s.hidden, s.ffn),
        }.get(part, (s.hidden,))  # fmt: skip
        return torch.ones(size) if len(size) == 1 else (torch.randn(size) * size[1] ** -0.5).to(self.dtype)


class FileWeights(dict[str, torch.Tensor]):
    """A model file's tensors, read when asked for."""

    def __init__(self, source: WeightSource, dtype: torch.dtype):
        super().__init__()
        self.source, self.dtype = source, dtype

    def __contains__(self, name: object) -> bool:
        return name in self.source.names

    def __missing__(self, name: str) -> torch.Tensor:
        return self.source.tensor(name, self.dtype)


def build(
    rows: int, tokens: int, step_tokens: int, dtype: torch.dtype, threads: int, level: str, source: WeightSource | None,
    kv: str = "auto", penalty_filter: str = "exact",
) -> tuple:
    """Open an engine with `rows` rows of `tokens` prompt tokens on scattered pages."""
    shape = source.shape if source else SMOL
    each = pages_for(tokens + PAGE)
    sizes = Shapes(max_rows=rows, max_model_len=each * PAGE, n_pages=rows * each)
    columns, slots = RowColumns(sizes), [StepSlot(sizes), StepSlot(sizes)]
    rng = np.random.default_rng(0)
    for row in range(rows):
        columns.put_ids(row, rng.integers(0, shape.vocab, tokens))
    columns.max_new.fill(1 << 30)
    columns.page_table[:] = rng.permutation(rows * each).reshape(rows, each)
    columns.temperature.fill(0.7)
    columns.top_p.fill(0.95)
    columns.penalty.fill(1.1)
    columns.seed[:] = np.arange(rows)
    columns.row_flags.fill(IGNORE_EOS)
    weights = FileWeights(source, dtype) if source else RandomWeights(SMOL, dtype)
    blocks = source.blocks if source else None
    step = NativeStep(
        shape, weights, columns, slots, rows * each, step_tokens, threads, level, blocks, kv, penalty_filter
    )
    return step, slots, columns


def run(step: NativeStep, slot: StepSlot, segments: list[tuple[int, int, int, int]]) -> dict[str, float]:
    """Run one step of (row, start, length, flags); its times."""
    slot.n_segs[0] = len(segments)
    table = np.array(segments, np.int64)
    for column, values in zip((slot.seg_row, slot.seg_start, slot.seg_len, slot.seg_flags), table.T, strict=True):
        column[: len(segments)] = values
    step.wait(step.launch(0))
    return step.times()


def prefill(step: NativeStep, slot: StepSlot, rows: int, tokens: int, most: int = 512) -> None:
    """Compute `tokens` prompt tokens of each of the first `rows` rows, at most `most` in a step."""
    for row in range(rows):
        for start in range(0, tokens, most):
            run(step, slot, [(row, start, min(most, tokens - start), 0 if start else FIRST)])


def bound_us(
    shape: ModelShape, rows: int, tokens: int, bits: tuple[float, float], elem: int, gbps: float, tflops: float
) -> float:
    """A decode step's bound in us: the larger of bytes over bandwidth and operations over peak.

    bits  of a weight of the layers and of the head, as the step reads them
    """
    s = shape
    kv = 2 * s.n_layers * s.n_kv_heads * s.head_dim * tokens * rows
    layers, head = s.n_layers * layer_params(s), s.vocab * s.hidden
    flops = 2 * (layers + head) * rows + 2 * kv * s.n_heads / s.n_kv_heads
    return max(((layers * bits[0] + head * bits[1]) / 8 + kv * elem) / gbps / 1e3, flops / tflops / 1e6)


def layer_params(shape: ModelShape) -> int:
    """Count the weights of a layer's matrices."""
    s = shape
    return s.hidden * s.head_dim * (2 * s.n_heads + 2 * s.n_kv_heads) + 3 * s.hidden * s.ffn


def block_bits(source: WeightSource | None) -> tuple[float, float]:
    """Average bits of a weight in the file, of the layers and of the head; 16 where there are no blocks."""
    if source is None:
        return 16, 16
    s = source.shape
    sizes = {False: s.n_layers * layer_params(s), True: s.vocab * s.hidden}
    n_bytes = dict.fromkeys(sizes, 0)
    for name in source.names:
        if (found := source.blocks(name)) is not None:
            n_bytes[name in ("embed", "head")] += found[1].size
    layers, head = (8 * n_bytes[is_head] / sizes[is_head] if n_bytes[is_head] else 16 for is_head in sizes)
    return layers, head


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,32,128,256")
    parser.add_argument("--tokens", type=int, default=200, help="context of each row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--level", default="auto")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--prefill", type=int, default=192, help="tokens of a prompt chunk that is timed too; 0: none")
    parser.add_argument("--model", type=Path, help="a GGUF file whose weights and blocks are used")
    parser.add_argument("--gbps", type=float, default=28.0, help="measured memory bandwidth, for the bound")
    parser.add_argument("--tflops", type=float, default=5.8, help="measured matrix peak, for the bound")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print a table."""
    args = parse()
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    source = open_model(args.model) if args.model else None
    counts = [int(n) for n in args.rows.split(",")]
    step, slots, _ = build(max(counts), args.tokens, 512, dtype, args.threads, args.level, source)
    prefill(step, slots[0], max(counts), args.tokens)
    plans = {f"{n} rows": [(r, args.tokens, 1, SAMPLE) for r in range(n)] for n in counts}
    shape, plain = step.shape, (8 * dtype.itemsize,) * 2
    bits = block_bits(source) if dtype == torch.bfloat16 else plain
    bounds = [
        bound_us(shape, n, args.tokens, bits if n <= UNPACK_ROWS else plain, dtype.itemsize,
                 args.gbps, args.tflops)
        for n in counts
    ]  # fmt: skip
    if args.prefill:
        chunk = min(args.prefill, args.tokens, 512)
        plans[f"chunk of {chunk}"] = [(0, 0, chunk, FIRST)]
        bounds.append(2 * shape.n_layers * layer_params(shape) * chunk / args.tflops / 1e6)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in plans}
    for _ in range(args.rounds):
        for name, plan in plans.items():
            samples[name].append(run(step, slots[0], plan))
    print(f"{step.name}, {args.threads} threads, {args.tokens} tokens of context")
    print(f"{bits[0]:.2f} bits read of a layer's weight, {bits[1]:.2f} of the head's")
    print("microseconds: median (tenth percentile)")
    print("stage".ljust(12) + "".join(f"{name:>20}" for name in plans))
    for stage in STAGES:
        cells = []
        for name in plans:
            values = np.array([s[stage] for s in samples[name]])
            cells.append(f"{np.median(values):12.0f} {f'({np.percentile(values, 10):.0f})':>7}")
        print(stage.ljust(12) + "".join(cells))
    print("bound".ljust(12) + "".join(f"{b:12.0f}        " for b in bounds))
    step.close()


if __name__ == "__main__":
    main()
