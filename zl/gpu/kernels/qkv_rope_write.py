"""After the fused QKV product: bias, rotary embedding, and the write into KV pages, in one launch.

State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zl.errors import ShapeError
from zl.gpu.kernels.launch import Settings, Variant, expect, expect_same_device, power_of_two
from zl.gpu.kernels.rope import rope_reference
from zl.shapes import PAGE


@triton.jit
def _rotate(qkv, bias, column, heads, lane, inside, cos, sin, HALF: tl.constexpr, HAS_BIAS: tl.constexpr):
    # The two halves of each head as tiles [heads, HALF]; pair i of a head is (i, i + HALF).
    first_at = column + heads[:, None] * (2 * HALF) + lane[None, :]
    first = tl.load(qkv + first_at, mask=inside[:, None], other=0.0)
    second = tl.load(qkv + first_at + HALF, mask=inside[:, None], other=0.0)
    if HAS_BIAS:
        first += tl.load(bias + first_at, mask=inside[:, None], other=0.0)
        second += tl.load(bias + first_at + HALF, mask=inside[:, None], other=0.0)
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit
def _qkv_kernel(
    qkv, bias, cos_table, sin_table, positions, slots, tails, n_live, q, pool_k, pool_v,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, H_POW2: tl.constexpr, KH_POW2: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    if t >= tl.load(n_live):
        return
    HALF: tl.constexpr = D // 2
    slot = tl.load(slots + t).to(tl.int64)
    if slot < 0:
        return
    lane = tl.arange(0, HALF)
    pos = tl.load(positions + t)
    cos = tl.load(cos_table + pos * HALF + lane)
    sin = tl.load(sin_table + pos * HALF + lane)
    line = qkv + t.to(tl.int64) * ((H + 2 * KH) * D)

    heads = tl.arange(0, H_POW2)
    first, second = _rotate(line, bias, 0, heads, lane, heads < H, cos, sin, HALF, HAS_BIAS)
    at = q + t.to(tl.int64) * (H * D) + heads[:, None] * D + lane[None, :]
    tl.store(at, first.to(tl.bfloat16), mask=(heads < H)[:, None])
    tl.store(at + HALF, second.to(tl.bfloat16), mask=(heads < H)[:, None])

    heads = tl.arange(0, KH_POW2)
    inside = (heads < KH)[:, None]
    first, second = _rotate(line, bias, H * D, heads, lane, heads < KH, cos, sin, HALF, HAS_BIAS)
    in_slot = heads[:, None] * D + lane[None, :]
    tl.store(pool_k + slot * (KH * D) + in_slot, first.to(tl.bfloat16), mask=inside)
    tl.store(pool_k + slot * (KH * D) + in_slot + HALF, second.to(tl.bfloat16), mask=inside)

    wide = tl.arange(0, D)
    in_slot = heads[:, None] * D + wide[None, :]
    value = tl.load(line + (H + KH) * D + in_slot, mask=inside, other=0.0)
    if HAS_BIAS:
        value += tl.load(bias + (H + KH) * D + in_slot, mask=inside, other=0.0)
    tl.store(pool_v + slot * (KH * D) + in_slot, value.to(tl.bfloat16), mask=inside)

    # What an earlier owner left behind in this page may be NaN, and zero times NaN is NaN.
    zero = tl.zeros([KH_POW2, D], tl.bfloat16)
    for j in range(tl.load(tails + t)):
        stale = (slot + 1 + j) * (KH * D) + in_slot
        tl.store(pool_k + stale, zero, mask=inside)
        tl.store(pool_v + stale, zero, mask=inside)


def settings(n_heads: int, n_kv_heads: int, head_dim: int, *, has_bias: bool) -> Settings:
    """Return the launch settings for a model's heads."""
    return Settings(
        {
            "H": n_heads,
            "KH": n_kv_heads,
            "D": head_dim,
            "H_POW2": power_of_two(n_heads),
            "KH_POW2": power_of_two(n_kv_heads),
            "HAS_BIAS": has_bias,
        },
        num_warps=4,
        num_stages=1,
    )


def _check(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tails: torch.Tensor,
    n_live: torch.Tensor,
    q: torch.Tensor,
    pool: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[int, int, int, int]:
    expect("q", q, torch.bfloat16, None, None, None)
    n_tokens, n_heads, head_dim = q.shape
    expect("pool", pool, torch.bfloat16, 2, None, PAGE, None, head_dim)
    n_kv = pool.shape[3]
    if n_heads % n_kv:
        raise ShapeError("q", f"{n_heads} heads", f"a multiple of the pool's {n_kv}")
    if head_dim not in (64, 128):
        raise ShapeError("q", f"head_dim {head_dim}", "head_dim 64 or 128")
    expect("qkv", qkv, torch.float32, n_tokens, (n_heads + 2 * n_kv) * head_dim)
    expect("cos", cos, torch.float32, None, head_dim // 2)
    expect("sin", sin, torch.float32, cos.shape[0], head_dim // 2)
    for name, column in (("positions", positions), ("slots", slots), ("tails", tails)):
        expect(name, column, torch.int32, n_tokens)
    expect("n_live", n_live, torch.int32, 1)
    if bias is not None:
        expect("bias", bias, torch.float32, qkv.shape[1])
    # fmt: off
    expect_same_device(
        q=q, qkv=qkv, cos=cos, sin=sin, positions=positions, slots=slots, tails=tails, n_live=n_live, pool=pool,
        bias=bias,
    )
    # fmt: on
    return n_tokens, n_heads, n_kv, head_dim


def qkv_rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tails: torch.Tensor,
    n_live: torch.Tensor,
    q: torch.Tensor,
    pool: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """Rotate queries and keys, round to bf16, and write keys and values into their slots.

    qkv        f32 [T, (n_heads + 2 * n_kv_heads) * head_dim]: queries, keys, values
    cos, sin   f32 [n_positions, head_dim / 2]
    positions  int32 [T], tokens
    slots      int32 [T]; -1 skips the token
    tails      int32 [T], slots after this one to zero, in the same page
    n_live     int32 [1], device: tokens from there on are skipped
    q          bf16 [T, n_heads, head_dim], written
    pool       bf16 [2, n_pages, PAGE, n_kv_heads, head_dim], one layer, written
    bias       f32 [(n_heads + 2 * n_kv_heads) * head_dim] or None
    Ready      after the current stream; safe to capture
    Raises     ShapeError
    Source     RoPE, arXiv:2104.09864, half-rotation layout; PagedAttention, arXiv:2309.06180, section 4
    """
    n_tokens, n_heads, n_kv, head_dim = _check(qkv, cos, sin, positions, slots, tails, n_live, q, pool, bias)
    chosen = settings(n_heads, n_kv, head_dim, has_bias=bias is not None)
    _qkv_kernel[(n_tokens,)](
        qkv, bias, cos, sin, positions, slots, tails, n_live, q, pool[0], pool[1], **chosen.keywords()
    )


def qkv_rope_write_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tails: torch.Tensor,
    n_live: torch.Tensor,
    q: torch.Tensor,
    pool: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """Do what `qkv_rope_write` does, in plain torch."""
    _, n_heads, n_kv, head_dim = _check(qkv, cos, sin, positions, slots, tails, n_live, q, pool, bias)
    used = [t for t in range(int(n_live)) if int(slots[t]) >= 0]
    lines = qkv[used] if bias is None else qkv[used] + bias
    heads = lines.view(len(used), n_heads + 2 * n_kv, head_dim)
    at = positions[used].long()
    rotated = rope_reference(heads[:, : n_heads + n_kv], cos[at], sin[at])
    q[used] = rotated[:, :n_heads].to(torch.bfloat16)
    flat = pool.view(2, -1, n_kv, head_dim)
    flat[0, slots[used].long()] = rotated[:, n_heads:].to(torch.bfloat16)
    flat[1, slots[used].long()] = heads[:, n_heads + n_kv :].to(torch.bfloat16)
    for t in used:
        slot = int(slots[t])
        flat[:, slot + 1 : slot + 1 + int(tails[t])] = 0


def variants(n_heads: int, n_kv_heads: int, head_dim: int, *, has_bias: bool) -> list[Variant]:
    """List what a build compiles of this file for a model's heads."""
    types = dict.fromkeys(("positions", "slots", "tails", "n_live"), "*i32")
    types |= dict.fromkeys(("qkv", "cos_table", "sin_table"), "*fp32")
    types |= dict.fromkeys(("q", "pool_k", "pool_v"), "*bf16")
    if has_bias:
        types["bias"] = "*fp32"
    chosen = settings(n_heads, n_kv_heads, head_dim, has_bias=has_bias)
    return [Variant(f"qkv_rope_write {n_heads}/{n_kv_heads}x{head_dim}", _qkv_kernel, types, chosen)]
