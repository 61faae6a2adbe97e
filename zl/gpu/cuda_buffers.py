"""What the CUDA step keeps on the device: a layer's weights, a bucket's activations, and how both come to be there.

State: none; the tensors belong to who asks for them. Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zl.gpu.kernels.context_loader import Context
from zl.gpu.kernels.decode_attention import Partials
from zl.gpu.kernels.sampling_columns import SegmentSampling
from zl.gpu.kernels.stop_check import Draws
from zl.gpu.upload import Uploader
from zl.shapes import ModelShape

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's tensors on the device: matrices bf16 [out, in], q over k over v, gate over up; the rest float32."""

    attn_norm: torch.Tensor
    w_qkv: torch.Tensor
    b_qkv: torch.Tensor | None
    wo: torch.Tensor
    bo: torch.Tensor | None
    mlp_norm: torch.Tensor
    w_gate_up: torch.Tensor
    b_gate_up: torch.Tensor | None
    w_down: torch.Tensor
    b_down: torch.Tensor | None


class Tables(NamedTuple):
    """What no layer owns: embedding bf16 [vocab, hidden], last norm float32 [hidden], head, the embedding if tied."""

    embed: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True, slots=True)
class Buffers:
    """One bucket's activations: float32 and bf16 [T, …], then [R, …] for the segments' last tokens."""

    context: Context
    x: torch.Tensor
    h: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    act: torch.Tensor
    partials: Partials
    last: torch.Tensor
    logits: torch.Tensor
    scratch: torch.Tensor
    sampling: SegmentSampling
    draws: Draws
    drawn: torch.Tensor

    def front(self, t: int, r: int) -> Buffers:
        """Return views of the first `t` tokens' and `r` segment places' parts."""
        c = self.context
        return Buffers(
            context=Context._make([*(column[:t] for column in c[:5]), *(column[:r] for column in c[5:11]), *c[11:]]),
            x=self.x[:t],
            h=self.h[:t],
            qkv=self.qkv[:t],
            q=self.q[:t],
            attended=self.attended[:t],
            gate_up=self.gate_up[:t],
            act=self.act[:t],
            partials=Partials(*(part[:r] for part in self.partials)),
            last=self.last[:r],
            logits=self.logits[:r],
            scratch=self.scratch[:r],
            sampling=SegmentSampling(*(column[:r] for column in self.sampling)),
            draws=Draws(*(column[:r] for column in self.draws)),
            drawn=self.drawn[:r],
        )

    @classmethod
    def allocate(cls, shape: ModelShape, t: int, r: int, max_len: int, device: torch.device) -> Buffers:
        """Allocate zeroed buffers for `t` tokens and `r` segment places."""
        s = shape

        def f32(*size: int) -> torch.Tensor:
            return torch.zeros(size, device=device)

        def bf16(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=BF16, device=device)

        draws = Draws(
            torch.zeros(r, dtype=torch.int64, device=device), f32(r), torch.zeros(r, dtype=torch.bool, device=device)
        )
        return cls(
            context=Context.allocate(t, r, device),
            x=f32(t, s.hidden),
            h=bf16(t, s.hidden),
            qkv=f32(t, (s.n_heads + 2 * s.n_kv_heads) * s.head_dim),
            q=bf16(t, s.n_heads, s.head_dim),
            attended=bf16(t, s.n_heads, s.head_dim),
            gate_up=f32(t, 2 * s.ffn),
            act=bf16(t, s.ffn),
            partials=Partials.allocate(r, max_len, s.n_heads, s.head_dim, device),
            last=bf16(r, s.hidden),
            logits=f32(r, s.vocab),
            scratch=f32(r, s.vocab),
            sampling=SegmentSampling.allocate(r, s.vocab, device),
            draws=draws,
            drawn=torch.full((r,), -1, dtype=torch.int32, device=device),
        )


def load_layer(tensors: Mapping[str, torch.Tensor], i: int, upload: Uploader, into: Layer | None = None) -> Layer:
    """Join and upload one layer's tensors, by canonical name; `into` a layer of the same shape, in place."""

    def matrix(target: torch.Tensor | None, *names: str) -> torch.Tensor:
        return upload.tensor([tensors[f"layers.{i}.{n}"] for n in names], BF16, into=target)

    def vector(target: torch.Tensor | None, name: str) -> torch.Tensor:
        return upload.tensor([tensors[f"layers.{i}.{name}"]], torch.float32, into=target)

    def bias(target: torch.Tensor | None, *names: str) -> torch.Tensor | None:
        full = [f"layers.{i}.{name}" for name in names]
        if not any(name in tensors for name in full):
            return None
        sizes = [tensors[name.replace(".b_", ".w_").replace(".b", ".w")].shape[0] for name in full]
        parts = [tensors[n].float() if n in tensors else torch.zeros(size) for n, size in zip(full, sizes, strict=True)]
        return upload.tensor(parts, torch.float32, into=target)

    return Layer(
        vector(into.attn_norm if into else None, "attn_norm"),
        matrix(into.w_qkv if into else None, "wq", "wk", "wv"),
        bias(into.b_qkv if into else None, "bq", "bk", "bv"),
        matrix(into.wo if into else None, "wo"),
        bias(into.bo if into else None, "bo"),
        vector(into.mlp_norm if into else None, "mlp_norm"),
        matrix(into.w_gate_up if into else None, "w_gate", "w_up"),
        bias(into.b_gate_up if into else None, "b_gate", "b_up"),
        matrix(into.w_down if into else None, "w_down"),
        bias(into.b_down if into else None, "b_down"),
    )
