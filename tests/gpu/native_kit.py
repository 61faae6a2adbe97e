"""What the native step's tests share: tiny models, columns and slots, a dense torch reference, a driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from zl.gpu.kernels.rope import rope_table
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import FIRST, IGNORE_EOS, SAMPLE, RowColumns, StepSlot
from zl.shapes import ModelShape, Shapes, pages_for


def tiny(**changes: object) -> ModelShape:
    """A Llama of two layers; any field can be replaced."""
    fields: dict[str, object] = {
        "name": "tiny", "n_layers": 2, "hidden": 192, "n_heads": 6, "n_kv_heads": 2, "head_dim": 64, "ffn": 320,
        "vocab": 500, "max_position": 512, "rms_eps": 1e-5, "rope_theta": 10_000.0,
    }  # fmt: skip
    return ModelShape(**{**fields, **changes})  # type: ignore[arg-type]


SMOL = {"hidden": 576, "n_heads": 9, "n_kv_heads": 3, "head_dim": 64, "ffn": 1536, "vocab": 49_152}


def random_weights(shape: ModelShape, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under the canonical names, scaled so that activations stay near one."""
    g = torch.Generator().manual_seed(seed)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, generator=g) * k**-0.5).to(dtype)

    def vector(n: int, mean: float) -> torch.Tensor:
        return mean + 0.1 * torch.randn(n, generator=g)

    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    out = {"embed": torch.randn(shape.vocab, shape.hidden, generator=g).to(dtype), "norm": vector(shape.hidden, 1)}
    if not shape.tied:
        out["head"] = matrix(shape.vocab, shape.hidden)
    sizes = {
        "wq": (q, shape.hidden), "wk": (kv, shape.hidden), "wv": (kv, shape.hidden), "wo": (shape.hidden, q),
        "w_gate": (shape.ffn, shape.hidden), "w_up": (shape.ffn, shape.hidden), "w_down": (shape.hidden, shape.ffn),
    }  # fmt: skip
    for layer in range(shape.n_layers):
        at = f"layers.{layer}."
        out[at + "attn_norm"], out[at + "mlp_norm"] = vector(shape.hidden, 1), vector(shape.hidden, 1)
        for name, size in sizes.items():
            out[at + name] = matrix(*size)
            if shape.mlp_bias if name.startswith("w_") else shape.attention_bias:
                out[at + ("b_" + name[2:] if name.startswith("w_") else "b" + name[1:])] = vector(size[0], 0)
    return out


def reference(shape: ModelShape, weights: dict[str, torch.Tensor], ids: list[int]) -> tuple[torch.Tensor, list, list]:
    """Logits of all positions and each layer's K and V of one sequence, without cache or pages.

    float32 weights are computed in float64; bfloat16 ones in float32 with rounding where the contract rounds.
    """
    rounds = weights["embed"].dtype == torch.bfloat16
    wide = torch.float32 if rounds else torch.float64
    w = {name: t.to(wide) for name, t in weights.items()}

    def cut(t: torch.Tensor) -> torch.Tensor:
        return t.bfloat16().to(wide) if rounds else t

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return cut(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + shape.rms_eps) * w[name])

    def linear(x: torch.Tensor, at: str, name: str, bias: str) -> torch.Tensor:
        return x @ w[at + name].T + w.get(at + bias, torch.zeros((), dtype=wide))

    cos, sin = (t.to(wide)[: len(ids), None] for t in rope_table(shape, len(ids)))

    def turn(x: torch.Tensor) -> torch.Tensor:
        lo, hi = x.chunk(2, -1)
        return cut(torch.cat([lo * cos - hi * sin, hi * cos + lo * sin], -1))

    def heads(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.view(len(ids), n, shape.head_dim)

    x, keys, values = w["embed"][ids], [], []
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for layer in range(shape.n_layers):
        at = f"layers.{layer}."
        h = norm(x, at + "attn_norm")
        q = turn(heads(linear(h, at, "wq", "bq"), shape.n_heads))
        k = turn(heads(linear(h, at, "wk", "bk"), shape.n_kv_heads))
        v = cut(heads(linear(h, at, "wv", "bv"), shape.n_kv_heads))
        keys.append(k), values.append(v)
        group = shape.n_heads // shape.n_kv_heads
        s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)).masked_fill(~mask, -torch.inf)
        e = torch.exp((s - s.amax(-1, keepdim=True)) * shape.head_dim**-0.5)
        o = torch.einsum("hqk,khd->qhd", cut(e), v.repeat_interleave(group, 1)) / e.sum(-1).T[..., None]
        x = x + linear(cut(o.flatten(1)), at, "wo", "bo")
        h = norm(x, at + "mlp_norm")
        act = torch.nn.functional.silu(linear(h, at, "w_gate", "b_gate")) * linear(h, at, "w_up", "b_up")
        x = x + linear(cut(act), at, "w_down", "b_down")
    return norm(x, "norm") @ w["embed" if shape.tied else "head"].T, keys, values


@dataclass(frozen=True)
class Piece:
    """One segment of a step."""

    row: int
    start: int
    length: int
    flags: int


class Bench:
    """A native step with columns and slots of its own; pages of a row are scattered over the pool."""

    def __init__(
        self, shape: ModelShape, weights: dict[str, torch.Tensor], *, rows: int = 8, model_len: int = 256,
        n_pages: int = 64, step_tokens: int = 256, threads: int = 1, level: str = "auto",
        blocks: Callable[[str], tuple[str, np.ndarray] | None] | None = None, kv: str = "auto",
        penalty_filter: str = "exact", arena: np.ndarray | None = None,
    ):  # fmt: skip
        sizes = Shapes(max_rows=rows, max_model_len=model_len, n_pages=n_pages)
        self.columns = RowColumns(sizes, arena=arena)
        self.slots = [StepSlot(sizes), StepSlot(sizes)]
        self.columns.max_new.fill(1000)
        self.columns.penalty.fill(1.0)
        self.columns.top_p.fill(1.0)
        self.columns.row_flags.fill(IGNORE_EOS)
        self.free = np.random.default_rng(5).permutation(n_pages).tolist()
        self.step = NativeStep(
            shape, weights, self.columns, self.slots, n_pages, step_tokens, threads, level, blocks, kv, penalty_filter
        )
        self.turn = 0

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.step.close()

    def seat(self, row: int, ids: list[int], room: int = 0) -> None:
        """Give a row its prompt and the pages for it and `room` more tokens."""
        self.columns.put_ids(row, ids)
        need = pages_for(len(ids) + room)
        self.columns.page_table[row] = -1
        for i in range(need):
            self.columns.page_table[row, i] = self.free.pop()

    def leave(self, row: int) -> None:
        """Return a row's pages."""
        table = self.columns.page_table[row]
        self.free.extend(int(p) for p in table if p >= 0)
        table.fill(-1)

    def plan(self, pieces: list[Piece]) -> StepSlot:
        """Write a slot."""
        slot = self.slots[self.turn]
        slot.n_segs[0] = len(pieces)
        for i, piece in enumerate(pieces):
            slot.seg_row[i], slot.seg_start[i], slot.seg_len[i] = piece.row, piece.start, piece.length
            slot.seg_flags[i] = piece.flags
        return slot

    def run(self, *pieces: Piece) -> StepSlot:
        """Run one step to its end."""
        slot = self.plan(list(pieces))
        seq = self.step.launch(self.turn)
        self.turn ^= 1
        self.step.wait(seq)
        return slot

    def prefill(self, row: int, cuts: list[int] | None = None) -> np.ndarray:
        """Compute a row's prompt in chunks ending at `cuts` (the whole by default); the last logits."""
        n = int(self.columns.prompt_len[row])
        ends = [*(cuts or []), n]
        start = 0
        for end in ends:
            flags = (FIRST if start == 0 else 0) | (SAMPLE if end == n else 0)
            self.run(Piece(row, start, end - start, flags))
            start = end
        return self.step.logits()[0]
