"""Matrix product with a weight, batch-invariant: a row's bits do not depend on how many rows there are.

Every output element is one chain of tensor-core steps over K, from 0 up, in one accumulator: no split over K, one K
block per weight shape. Tiles over rows and columns may vary with the bucket. On Hopper the wide tensor-core instruction
(wgmma) takes tiles of 64 rows and more, and nothing promises that it rounds like the narrow one, so there each tile has
64 rows or more; before Hopper only the narrow one exists. State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zl.errors import ShapeError
from zl.gpu.kernels.launch import INTERPRETED, Settings, Variant, expect, expect_same_device, power_of_two
from zl.gpu.kernels.matmul import matmul_reference

HOPPER = 90
"""Compute capability, times ten, from which tiles of 64 rows use wgmma."""


# Not specialised: the number of row tiles is all that the kernel knows of a bucket, and one binary serves all.
@triton.jit(do_not_specialize=["n_row_tiles"])
def _linear_kernel(
    x, weight, bias, out, n_live, n_row_tiles,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    # Row tiles vary fastest: those that share a tile of the weight run together and find it in L2.
    pid = tl.program_id(0)
    first_row = (pid % n_row_tiles) * BLOCK_M
    live = tl.load(n_live)
    if first_row >= live:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = (pid // n_row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    row_ok = rows < live
    column_ok = columns < N
    x_at = x + rows[:, None].to(tl.int64) * K + lane[None, :]
    w_at = weight + columns[:, None].to(tl.int64) * K + lane[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(x_at + k, mask=row_ok[:, None], other=0.0)
        if N % BLOCK_N == 0:
            b = tl.load(w_at + k)
        else:
            b = tl.load(w_at + k, mask=column_ok[:, None], other=0.0)
        if INTERPRETED:
            acc = tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), acc)
        else:
            acc = tl.dot(a, tl.trans(b), acc)
    inside = row_ok[:, None] & column_ok[None, :]
    at = out + rows[:, None].to(tl.int64) * N + columns[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=column_ok, other=0.0)[None, :]
    if ADD:
        acc += tl.load(at, mask=inside, other=0.0)
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


def k_block(k: int) -> int:
    """Return the K block of a weight with `k` inputs: the widest of 64, 32 and 16 that divides it."""
    for block in (64, 32, 16):
        if k % block == 0:
            return block
    raise ShapeError("weight", f"{k} inputs", "a multiple of 16")


def settings(m: int, n: int, k: int, *, capability: int, has_bias: bool = False, add: bool = False) -> Settings:
    """Return the launch settings for a bucket of `m` rows and a weight [n, k].

    capability  compute capability times ten; decides which tiles share one tensor-core instruction
    """
    least = 64 if capability >= HOPPER else 16
    block_m = max(least, min(128, power_of_two(m)))
    if block_m == 128:
        # 128 x 64 keeps two programs on a multiprocessor, and enough of them for a narrow weight.
        block_n, warps, stages = (128, 8, 4) if n >= 4096 else (64, 8, 4)
    elif block_m == 64:
        block_n, warps, stages = (64, 4, 5) if n >= 16_384 else (32, 4, 6)
    else:
        # Decode reads each weight once: narrow tiles give every multiprocessor a stream, deep stages keep it busy.
        block_n, warps, stages = (64, 4, 6) if n >= 16_384 else (32, 4, 8)
    return Settings(
        {
            "N": n,
            "K": k,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": k_block(k),
            "HAS_BIAS": has_bias,
            "ADD": add,
        },
        num_warps=warps,
        num_stages=stages,
    )


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    n_live: torch.Tensor,
    bias: torch.Tensor | None,
    add: bool,
) -> tuple[int, int, int]:
    expect("x", x, torch.bfloat16, None, None)
    m, k = x.shape
    expect("weight", weight, torch.bfloat16, None, k)
    n = weight.shape[0]
    k_block(k)
    expect("out", out, torch.float32 if add else (torch.float32, torch.bfloat16), m, n)
    expect("n_live", n_live, torch.int32, 1)
    if bias is not None:
        expect("bias", bias, torch.float32, n)
    expect_same_device(x=x, weight=weight, out=out, n_live=n_live, bias=bias)
    return m, n, k


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    n_live: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    add: bool = False,
    capability: int,
) -> None:
    """Multiply live rows by a weight, accumulate in float32, add the bias, and store or add to `out`.

    x           bf16 [M, K]
    weight      bf16 [N, K], K a multiple of 16
    out         f32 or bf16 [M, N], written up to n_live; f32 if `add`: the residual stream, added to
    n_live      int32 [1], device
    bias        f32 [N] or None
    capability  of the device, times ten (80, 90)
    Numerics    the sum over K, then the bias, then `out`; a row's bits depend on that row alone
    Ready       after the current stream; safe to capture
    Raises      ShapeError
    """
    m, n, k = _check(x, weight, out, n_live, bias, add)
    chosen = settings(m, n, k, capability=capability, has_bias=bias is not None, add=add)
    n_row_tiles = triton.cdiv(m, chosen.constexprs["BLOCK_M"])
    grid = n_row_tiles * triton.cdiv(n, chosen.constexprs["BLOCK_N"])
    _linear_kernel[(grid,)](x, weight, bias, out, n_live, n_row_tiles, **chosen.keywords())


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    n_live: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    add: bool = False,
    capability: int,  # noqa: ARG001
) -> None:
    """Do what `linear` does, in plain torch."""
    _check(x, weight, out, n_live, bias, add)
    live = int(n_live)
    product = matmul_reference(x[:live], weight, bias)
    out[:live] = (out[:live] + product if add else product).to(out.dtype)


def variants(
    m: int, n: int, k: int, *, capability: int, has_bias: bool = False, add: bool = False, out: str = "*fp32"
) -> list[Variant]:
    """List what a build compiles of this file for one bucket and weight shape."""
    types = {"x": "*bf16", "weight": "*bf16", "out": out, "n_live": "*i32", "n_row_tiles": "i32"}
    if has_bias:
        types["bias"] = "*fp32"
    chosen = settings(m, n, k, capability=capability, has_bias=has_bias, add=add)
    what = f"{' +bias' if has_bias else ''}{' +=' if add else ''}"
    return [Variant(f"linear {chosen.constexprs['BLOCK_M']}:{n}x{k}{what}", _linear_kernel, types, chosen)]
