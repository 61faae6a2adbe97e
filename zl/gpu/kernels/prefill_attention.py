"""Prefill attention: packed segments of any length over their rows' pages, causal.

State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zl.gpu.kernels.attention import split_tokens
from zl.gpu.kernels.decode_attention import Segments, attend_reference, check_attention
from zl.gpu.kernels.launch import Settings, Variant, power_of_two
from zl.gpu.kernels.paged_block import (
    LOG2_E,
    TILE_ROWS,
    attend_split,
    group_rows,
    merge_split,
    tile_warps,
)
from zl.shapes import PAGE


@triton.jit
def _prefill_kernel(
    q, pool_k, pool_v, page_table, seg_row, seg_start, seg_tokens, seg_offset, out,
    R: tl.constexpr, R_POW2: tl.constexpr, P: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, GROUP_ROWS: tl.constexpr, SPLIT: tl.constexpr, PAGE_TOKENS: tl.constexpr, SCALE: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = H // KH
    TILE: tl.constexpr = M // GROUP_ROWS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    # Segment s owns the tiles from offset // TILE + s on: enough for any lengths, found without a scan.
    s = tl.arange(0, R_POW2)
    first_tile = tl.load(seg_offset + s, mask=s < R, other=0) // TILE + s
    seg = tl.sum(((first_tile <= tile) & (s < R)).to(tl.int32), 0) - 1
    n = tl.load(seg_tokens + seg)
    if n < MIN_TOKENS:
        return
    offset = tl.load(seg_offset + seg)
    first = (tile - offset // TILE - seg) * TILE
    if first >= n:
        return
    start = tl.load(seg_start + seg)
    r = tl.arange(0, M)
    lane = tl.arange(0, D)
    token = first + r // GROUP_ROWS
    inside = (token < n) & (r % GROUP_ROWS < GROUP)
    head = kv_head * GROUP + r % GROUP_ROWS
    at = (offset + token).to(tl.int64) * (H * D) + head * D
    queries = tl.load(q + at[:, None] + lane[None, :], mask=inside[:, None], other=0.0)
    q_pos = tl.where(inside, start + token, -1)
    kv_end = start + tl.minimum(first + TILE, n)
    n_pages = (kv_end + PAGE_TOKENS - 1) // PAGE_TOKENS
    table = page_table + tl.load(seg_row + seg).to(tl.int64) * P
    m_all = tl.full([M], float("-inf"), tl.float32)
    total_all = tl.zeros([M], tl.float32)
    acc_all = tl.zeros([M, D], tl.float32)
    for first_page in range(0, n_pages, SPLIT // PAGE_TOKENS):
        end_page = tl.minimum(first_page + SPLIT // PAGE_TOKENS, n_pages)
        m, total, acc = attend_split(
            queries, pool_k, pool_v, table, first_page, end_page, q_pos, kv_end, kv_head, KH, D, M, PAGE_TOKENS, SCALE
        )
        m_all, total_all, acc_all = merge_split(m_all, total_all, acc_all, m, total, acc, SCALE)
    result = acc_all / tl.where(inside, total_all, 1.0)[:, None]
    tl.store(out + at[:, None] + lane[None, :], result.to(tl.bfloat16), mask=inside[:, None])


def settings(
    n_rows: int, max_len: int, pages_per_row: int, n_heads: int, n_kv_heads: int, head_dim: int, *, min_tokens: int = 2
) -> Settings:
    """Return the launch settings for a model, its length and the fixed number of segment places."""
    return Settings(
        {
            "R": n_rows,
            "R_POW2": power_of_two(n_rows),
            "P": pages_per_row,
            "H": n_heads,
            "KH": n_kv_heads,
            "D": head_dim,
            "M": TILE_ROWS,
            "GROUP_ROWS": group_rows(n_heads, n_kv_heads),
            "SPLIT": split_tokens(max_len),
            "PAGE_TOKENS": PAGE,
            "SCALE": head_dim**-0.5 * LOG2_E,
            "MIN_TOKENS": min_tokens,
        },
        num_warps=tile_warps(head_dim),
        num_stages=3,
        fp_fusion=False,
    )


def prefill_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
    *,
    max_len: int,
    min_tokens: int = 2,
) -> None:
    """Attend every query of each segment to its row's keys up to and including the query's own position.

    q           bf16 [T, n_heads, head_dim], rotated; segments packed one after another from 0 on, in their order
    pool        bf16 [2, n_pages, PAGE, n_kv_heads, head_dim], one layer, this step's keys already written
    page_table  int32 [n_rows, P], P * PAGE >= max_len
    segments    those with fewer than `min_tokens` tokens are left to decode_attention
    out         bf16 [T, n_heads, head_dim], written for the tokens attended
    max_len     tokens; decides the splits, with the model's dimensions and nothing else
    Numerics    paged_block: the same bits as decode_attention, so those of a chunked prefill too
    Ready       after the current stream; safe to capture
    Raises      ShapeError
    Source      FlashAttention-2, arXiv:2307.08691; pages: arXiv:2309.06180
    """
    n_rows, n_heads, n_kv, head_dim = check_attention(q, pool, page_table, segments, out, max_len)
    chosen = settings(n_rows, max_len, page_table.shape[1], n_heads, n_kv, head_dim, min_tokens=min_tokens)
    tile = TILE_ROWS // chosen.constexprs["GROUP_ROWS"]
    _prefill_kernel[(q.shape[0] // tile + n_rows, n_kv)](
        q, pool[0], pool[1], page_table, *segments, out, **chosen.keywords()
    )


def prefill_attention_reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
    *,
    max_len: int,
    min_tokens: int = 2,
) -> None:
    """Do what `prefill_attention` does, in plain torch."""
    check_attention(q, pool, page_table, segments, out, max_len)
    for s in range(segments.row.shape[0]):
        if int(segments.tokens[s]) >= min_tokens:
            attend_reference(q, pool, page_table, segments, out, s)


def variants(
    n_rows: int, max_len: int, pages_per_row: int, n_heads: int, n_kv_heads: int, head_dim: int
) -> list[Variant]:
    """List what a build compiles of this file for a model and its length."""
    types = dict.fromkeys(("page_table", "seg_row", "seg_start", "seg_tokens", "seg_offset"), "*i32")
    types |= dict.fromkeys(("q", "pool_k", "pool_v", "out"), "*bf16")
    chosen = settings(n_rows, max_len, pages_per_row, n_heads, n_kv_heads, head_dim)
    return [Variant(f"prefill_attention {n_heads}/{n_kv_heads}x{head_dim}", _prefill_kernel, types, chosen)]
