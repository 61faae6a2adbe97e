"""What decode and prefill attention share, so that a token's bits are the same whichever of them computes it.

The keys of a row are cut into splits of a fixed number of tokens. Inside a split, pages are taken in order, one page at
a time, with a running maximum; splits are then merged in order. Both kernels use the two functions here on tiles of the
same size and the same number of warps, so that sums run in the same order inside a page too, and both are compiled
without contraction of multiply and add (tests/gpu/test_compile.py reads both from the compiled form). State: none.
Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from zl.errors import ShapeError
from zl.gpu.kernels.launch import INTERPRETED, power_of_two

LOG2_E = 1.4426950408889634
TILE_ROWS = 16
"""Query rows of a tile: the fewest that a tensor core takes. From 64 rows on Hopper would take another instruction."""


def group_rows(n_heads: int, n_kv_heads: int) -> int:
    """Return the query rows that one token takes in a tile: its heads of one KV head, padded to a power of two."""
    if n_kv_heads <= 0 or n_heads % n_kv_heads or n_heads // n_kv_heads > 16:
        raise ShapeError("q", f"{n_heads} heads over {n_kv_heads}", "1 to 16 query heads for each KV head")
    return power_of_two(n_heads // n_kv_heads)


def tile_warps(head_dim: int) -> int:
    """Return the warps of a tile: a wide head's accumulators do not fit one warp's registers."""
    return max(1, head_dim // 64)


@triton.jit
def attend_split(
    q, pool_k, pool_v, table, first_page, end_page, q_pos, kv_end, kv_head,
    KH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, PAGE_TOKENS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Attend q, bf16 [M, D], to a row's pages first_page..end_page: (maximum, sum of exponentials, weighted values)."""
    lane = tl.arange(0, D)
    place = tl.arange(0, PAGE_TOKENS)
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    in_page = place[:, None] * (KH * D) + kv_head * D + lane[None, :]
    for p in range(first_page, end_page):
        page = tl.load(table + p).to(tl.int64) * (PAGE_TOKENS * KH * D)
        pos = p * PAGE_TOKENS + place
        written = (pos < kv_end)[:, None]
        k = tl.load(pool_k + page + in_page, mask=written, other=0.0)
        v = tl.load(pool_v + page + in_page, mask=written, other=0.0)
        zero = tl.zeros([M, PAGE_TOKENS], tl.float32)
        if INTERPRETED:
            scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), zero)
        else:
            scores = tl.dot(q, tl.trans(k), zero)
        scores = tl.where(pos[None, :] <= q_pos[:, None], scores, float("-inf"))
        m_next = tl.maximum(m, tl.max(scores, 1))
        base = tl.where(m_next == float("-inf"), 0.0, m_next)
        decay = tl.exp2((m - base) * SCALE)
        weights = tl.exp2((scores - base[:, None]) * SCALE)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if INTERPRETED:
            acc = tl.dot(weights.to(tl.bfloat16).to(tl.float32), v.to(tl.float32), acc)
        else:
            acc = tl.dot(weights.to(tl.bfloat16), v, acc)
        m = m_next
    return m, total, acc


@triton.jit
def merge_split(m_all, total_all, acc_all, m, total, acc, SCALE: tl.constexpr):
    """Merge the next split into the splits so far; an empty one changes nothing."""
    m_next = tl.maximum(m_all, m)
    base = tl.where(m_next == float("-inf"), 0.0, m_next)
    old = tl.exp2((m_all - base) * SCALE)
    new = tl.exp2((m - base) * SCALE)
    return m_next, total_all * old + total * new, acc_all * old[:, None] + acc * new[:, None]
