"""Residual add and RMSNorm in one pass over the row.

State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zl.errors import ShapeError
from zl.gpu.kernels.launch import Settings, Variant, expect, expect_same_device, power_of_two
from zl.gpu.kernels.rmsnorm import rmsnorm_reference

MAX_HIDDEN = 16_384
"""Widest row that one program keeps in registers."""


@triton.jit
def _norm_kernel(
    x, delta, weight, out, index, n_live,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_INDEX: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    if HAS_INDEX:
        source = tl.load(index + i).to(tl.int64)
        if source < 0:
            return
    else:
        if i >= tl.load(n_live):
            return
        source = i.to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < HIDDEN
    row = tl.load(x + source * HIDDEN + lane, mask=inside, other=0.0)
    if HAS_DELTA:
        row += tl.load(delta + source * HIDDEN + lane, mask=inside, other=0.0)
        tl.store(x + source * HIDDEN + lane, row, mask=inside)
    mean = tl.sum(row * row, 0) / HIDDEN
    scale = 1.0 / tl.sqrt_rn(mean + EPS)
    gain = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i.to(tl.int64) * HIDDEN + lane, (row * scale * gain).to(tl.bfloat16), mask=inside)


def settings(hidden: int, eps: float, *, has_delta: bool, has_index: bool) -> Settings:
    """Return the launch settings for a width; the order of the sum follows from them."""
    block = power_of_two(hidden)
    return Settings(
        {"HIDDEN": hidden, "BLOCK": block, "EPS": eps, "HAS_DELTA": has_delta, "HAS_INDEX": has_index},
        num_warps=max(1, min(16, block // 512)),
        num_stages=1,
    )


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    n_live: torch.Tensor,
    delta: torch.Tensor | None,
    index: torch.Tensor | None,
) -> tuple[int, int]:
    expect("x", x, torch.float32, None, None)
    n_tokens, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ShapeError("x", f"hidden {hidden}", f"at most {MAX_HIDDEN}")
    expect("weight", weight, (torch.bfloat16, torch.float32), hidden)
    expect("n_live", n_live, torch.int32, 1)
    if delta is not None and index is not None:
        raise ShapeError("index", "an index together with delta", "one of the two")
    if delta is not None:
        expect("delta", delta, torch.float32, n_tokens, hidden)
    n_out = n_tokens
    if index is not None:
        expect("index", index, torch.int32, None)
        n_out = index.shape[0]
    expect("out", out, torch.bfloat16, n_out, hidden)
    expect_same_device(x=x, weight=weight, out=out, n_live=n_live, delta=delta, index=index)
    return n_out, hidden


def norm_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    n_live: torch.Tensor,
    *,
    eps: float,
    delta: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
) -> None:
    """Add `delta` to the residual stream if given, and write the RMS-normalised rows.

    x       f32 [T, hidden], residual stream; written where delta is given
    weight  f32 or bf16 [hidden]
    out     bf16 [T, hidden], or [len(index), hidden]: row i is the norm of x[index[i]]
    n_live  int32 [1], device: rows from there on are left alone (ignored where index is given)
    delta   f32 [T, hidden]
    index   int32 [n]; -1 skips the row
    Raises  ShapeError
    Source  RMSNorm, arXiv:1910.07467
    """
    n_out, hidden = _check(x, weight, out, n_live, delta, index)
    chosen = settings(hidden, eps, has_delta=delta is not None, has_index=index is not None)
    _norm_kernel[(n_out,)](x, delta, weight, out, index, n_live, **chosen.keywords())


def norm_residual_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    n_live: torch.Tensor,
    *,
    eps: float,
    delta: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
) -> None:
    """Do what `norm_residual` does, in plain torch."""
    _check(x, weight, out, n_live, delta, index)
    n = int(n_live)
    if delta is not None:
        x[:n] += delta[:n]
    if index is not None:
        kept = (index >= 0).nonzero().flatten()
        rows = x[index[kept].long()]
    else:
        kept = torch.arange(n, device=x.device)
        rows = x[:n]
    out[kept] = rmsnorm_reference(rows, weight.float(), eps, torch.bfloat16)


def variants(hidden: int, eps: float) -> list[Variant]:
    """List what a build compiles of this file for one width."""
    listed = []
    for has_delta, has_index in ((False, False), (True, False), (False, True)):
        types = {"x": "*fp32", "weight": "*fp32", "out": "*bf16", "n_live": "*i32"}
        if has_delta:
            types["delta"] = "*fp32"
        if has_index:
            types["index"] = "*i32"
        what = " delta" if has_delta else " index" if has_index else ""
        chosen = settings(hidden, eps, has_delta=has_delta, has_index=has_index)
        listed.append(Variant(f"norm_residual {hidden}{what}", _norm_kernel, types, chosen))
    return listed
