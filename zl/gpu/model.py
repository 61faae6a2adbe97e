"""The forward pass of the Llama family in plain torch: the slow twin that every fast path is compared with.

Owns no state: weights, tables and pool come as arguments. Refuses staging, programs, rows.
Numerics: float32 throughout, or bfloat16 at the points that the docstrings name; the residual is always float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from zl.gpu.kernels.attention import attention_reference
from zl.gpu.kernels.matmul import matmul_reference
from zl.gpu.kernels.rmsnorm import rmsnorm_reference
from zl.gpu.kernels.rope import rope_reference, rope_table
from zl.gpu.kernels.swiglu import swiglu_reference
from zl.gpu.pool import KVPool
from zl.gpu.source import WeightSource
from zl.shapes import PAGE, ModelShape, pages_for

__all__ = ["Layout", "Rope", "Weights", "forward", "load_weights", "logits", "make_rope", "rope_table"]

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's tensors by canonical name. Matrices hold values of `dtype`; norms and biases are always float32.

    `dtype` is what activations and keys are rounded to.
    """

    shape: ModelShape
    dtype: torch.dtype
    tensors: Mapping[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def bias(self, name: str) -> torch.Tensor | None:
        """Give a bias, f32, or None where the model has none."""
        return self.tensors.get(name)

    def widened(self) -> Weights:
        """Keep the same values in float32 storage: twice the memory, no conversion a step, not a bit of difference."""
        return Weights(self.shape, self.dtype, {name: tensor.float() for name, tensor in self.tensors.items()})

    def to(self, device: torch.device) -> Weights:
        """Place every tensor on a device."""
        return Weights(self.shape, self.dtype, {name: tensor.to(device) for name, tensor in self.tensors.items()})


def load_weights(source: WeightSource, dtype: torch.dtype, progress: Progress | None = None) -> Weights:
    """Load every tensor of a model onto the CPU. `progress` gets the share that is done, 0 to 1, after each tensor.

    Tensors that the file holds in `dtype` stay views of the mapped file.
    """
    tensors = {}
    names = sorted(source.names)
    for done, name in enumerate(names, 1):
        vector = name.endswith("norm") or name.rsplit(".", 1)[-1].startswith("b")
        tensors[name] = source.tensor(name, torch.float32 if vector else dtype)
        if progress is not None:
            progress(done / len(names))
    return Weights(source.shape, dtype, tensors)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables, f32 [n_positions, head_dim / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


def make_rope(shape: ModelShape, n_positions: int, device: torch.device | str = "cpu") -> Rope:
    """Compute the tables for positions below `n_positions`."""
    cos, sin = rope_table(shape, n_positions)
    return Rope(cos.to(device), sin.to(device))


@dataclass(frozen=True, slots=True)
class Layout:
    """Which packed tokens belong together: segment s is the next `lengths[s]` tokens, at positions `starts[s]` onwards.

    page_table  i64 [n_segs, n]; the first pages_for(starts[s] + lengths[s]) entries of row s are its pages in order,
                the rest are ignored
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    page_table: torch.Tensor

    def positions(self) -> torch.Tensor:
        """Compute every token's position, i64 [n_tokens]."""
        parts = [torch.arange(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True)]
        return torch.cat(parts).to(self.page_table.device)


@dataclass(frozen=True, slots=True)
class _Group:
    """Segments of one length and nearly one depth, computed together: one call for all decode rows."""

    tokens: torch.Tensor  # i64 [n_segs, length], indices into the packed tokens
    positions: torch.Tensor  # i64 [n_segs, length]
    pages: torch.Tensor  # i64 [n_segs, n_pages]


def _groups(layout: Layout) -> list[_Group]:
    device = layout.page_table.device
    members: dict[tuple[int, int], list[int]] = {}
    firsts, first = [], 0
    for s, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True)):
        depth = 1 << (pages_for(start + length) - 1).bit_length()
        members.setdefault((length, depth), []).append(s)
        firsts.append(first)
        first += length
    groups = []
    for (length, _), segs in members.items():
        used = torch.tensor([pages_for(layout.starts[s] + length) for s in segs], device=device)
        span = torch.arange(length, device=device)
        pages = layout.page_table[segs, : int(used.max())]
        # Padding repeats the row's own first page: finite by then, and masked.
        padding = torch.arange(pages.shape[1], device=device) >= used[:, None]
        groups.append(
            _Group(
                torch.tensor([firsts[s] for s in segs], device=device)[:, None] + span,
                torch.tensor([layout.starts[s] for s in segs], device=device)[:, None] + span,
                torch.where(padding, pages[:, :1], pages),
            )
        )
    return groups


def forward(weights: Weights, rope: Rope, token_ids: torch.Tensor, layout: Layout, pool: KVPool) -> torch.Tensor:
    """Run all layers over packed segments and write their keys and values into the pool.

    token_ids  i64 [n_tokens], the segments one after another
    Returns    [n_tokens, hidden] in weights.dtype, after the final norm
    Needs      every page touched to have been zeroed before its first token was written; the earlier positions of
               each segment's row to be in the pool already
    Numerics   bfloat16: norms, rotated q and k, v, attention weights, attention output and the gated activation are
               rounded to bf16; products accumulate in float32 and the residual stays float32
    """
    shape, dtype = weights.shape, weights.dtype
    positions = layout.positions()
    groups = _groups(layout)
    slots = torch.empty_like(positions)
    for group in groups:
        page = group.pages.gather(1, group.positions // PAGE)
        slots[group.tokens] = page * PAGE + group.positions % PAGE
    cos, sin = rope.cos[positions], rope.sin[positions]
    x = weights["embed"][token_ids].float()
    for layer in range(shape.n_layers):
        x = x + _attention(weights, layer, x, cos, sin, slots, groups, pool)
        x = x + _mlp(weights, layer, x)
    return rmsnorm_reference(x, weights["norm"], shape.rms_eps, dtype)


def logits(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Project hidden states [n, hidden] to the vocabulary, f32 [n, vocab]."""
    return matmul_reference(hidden, weights["embed" if weights.shape.tied else "head"])


def _attention(
    weights: Weights,
    layer: int,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    groups: Sequence[_Group],
    pool: KVPool,
) -> torch.Tensor:
    """Compute one layer's attention output, f32 [n_tokens, hidden], without the residual."""
    shape, dtype, at = weights.shape, weights.dtype, f"layers.{layer}."
    h = rmsnorm_reference(x, weights[at + "attn_norm"], shape.rms_eps, dtype)

    def project(name: str, n_heads: int) -> torch.Tensor:
        flat = matmul_reference(h, weights[f"{at}w{name}"], weights.bias(f"{at}b{name}"))
        return flat.view(-1, n_heads, shape.head_dim)

    q = rope_reference(project("q", shape.n_heads), cos, sin).to(dtype)
    k = rope_reference(project("k", shape.n_kv_heads), cos, sin).to(dtype)
    v = project("v", shape.n_kv_heads).to(dtype)
    pool.write(layer, slots, k, v)
    out = torch.empty_like(q)
    for group in groups:
        keys, values = pool.read(layer, group.pages)
        out[group.tokens] = attention_reference(q[group.tokens], keys, values, group.positions, shape.head_dim**-0.5)
    return matmul_reference(out.flatten(1), weights[at + "wo"], weights.bias(at + "bo"))


def _mlp(weights: Weights, layer: int, x: torch.Tensor) -> torch.Tensor:
    """Compute one layer's feed-forward output, f32 [n_tokens, hidden], without the residual."""
    shape, dtype, at = weights.shape, weights.dtype, f"layers.{layer}."
    h = rmsnorm_reference(x, weights[at + "mlp_norm"], shape.rms_eps, dtype)
    gate = matmul_reference(h, weights[at + "w_gate"], weights.bias(at + "b_gate"))
    up = matmul_reference(h, weights[at + "w_up"], weights.bias(at + "b_up"))
    return matmul_reference(swiglu_reference(gate, up, dtype), weights[at + "w_down"], weights.bias(at + "b_down"))
