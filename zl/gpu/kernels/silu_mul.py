"""SwiGLU's elementwise half: silu(gate) * up.

State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zl.errors import ShapeError
from zl.gpu.kernels.launch import Settings, Variant, expect, expect_same_device
from zl.gpu.kernels.swiglu import swiglu_reference


@triton.jit
def _silu_kernel(gate_up, out, n_live, FFN: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    if t >= tl.load(n_live):
        return
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < FFN
    base = gate_up + t.to(tl.int64) * (2 * FFN)
    gate = tl.load(base + lane, mask=inside, other=0.0)
    up = tl.load(base + FFN + lane, mask=inside, other=0.0)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + t.to(tl.int64) * FFN + lane, value.to(tl.bfloat16), mask=inside)


def settings(ffn: int) -> Settings:
    """Return the launch settings for a width."""
    return Settings({"FFN": ffn, "BLOCK": 1024}, 4, 1)


def _check(gate_up: torch.Tensor, out: torch.Tensor, n_live: torch.Tensor) -> tuple[int, int]:
    expect("gate_up", gate_up, torch.float32, None, None)
    if gate_up.shape[1] % 2:
        raise ShapeError("gate_up", f"width {gate_up.shape[1]}", "gate and up of equal width")
    n_tokens, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    expect("out", out, torch.bfloat16, n_tokens, ffn)
    expect("n_live", n_live, torch.int32, 1)
    expect_same_device(gate_up=gate_up, out=out, n_live=n_live)
    return n_tokens, ffn


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, n_live: torch.Tensor) -> None:
    """Write silu(gate) * up of each live token.

    gate_up  f32 [T, 2 * ffn], gate first
    out      bf16 [T, ffn], written up to n_live
    n_live   int32 [1], device
    Raises   ShapeError
    Source   SwiGLU, arXiv:2002.05202
    """
    n_tokens, ffn = _check(gate_up, out, n_live)
    chosen = settings(ffn)
    _silu_kernel[(n_tokens, triton.cdiv(ffn, chosen.constexprs["BLOCK"]))](gate_up, out, n_live, **chosen.keywords())


def silu_mul_reference(gate_up: torch.Tensor, out: torch.Tensor, n_live: torch.Tensor) -> None:
    """Do what `silu_mul` does, in plain torch."""
    _, ffn = _check(gate_up, out, n_live)
    n = int(n_live)
    out[:n] = swiglu_reference(gate_up[:n, :ffn], gate_up[:n, ffn:], torch.bfloat16)


def variants(ffn: int) -> list[Variant]:
    """List what a build compiles of this file for one width."""
    types = {"gate_up": "*fp32", "out": "*bf16", "n_live": "*i32"}
    return [Variant(f"silu_mul {ffn}", _silu_kernel, types, settings(ffn))]
