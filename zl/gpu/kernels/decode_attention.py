"""Decode attention: segments of one token, split over KV in a fixed order.

State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, N806

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from zl.errors import ShapeError
from zl.gpu.kernels.attention import attention_reference, split_tokens
from zl.gpu.kernels.launch import Settings, Variant, expect, expect_same_device
from zl.gpu.kernels.paged_block import (
    LOG2_E,
    TILE_ROWS,
    attend_split,
    group_rows,
    merge_split,
    tile_warps,
)
from zl.shapes import PAGE, pages_for


class Segments(NamedTuple):
    """Where the segments' tokens are, as `context_loader.Context` has it: int32 [R] each, device.

    row; start (position of the first token computed); tokens (0: nothing); offset (first token in the bucket)
    """

    row: torch.Tensor
    start: torch.Tensor
    tokens: torch.Tensor
    offset: torch.Tensor


class Partials(NamedTuple):
    """What the splits leave for their merge; one set serves all layers.

    acc f32 [R, n_splits, n_heads, head_dim]; maximum and total f32 [R, n_splits, n_heads]
    """

    acc: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor

    @classmethod
    def allocate(
        cls, n_rows: int, max_len: int, n_heads: int, head_dim: int, device: str | torch.device = "cpu"
    ) -> Partials:
        """Allocate for a number of segment places and a model length."""
        n_splits = triton.cdiv(max_len, split_tokens(max_len))
        acc = torch.zeros(n_rows, n_splits, n_heads, head_dim, device=device)
        return cls(acc, torch.zeros(acc.shape[:3], device=device), torch.zeros(acc.shape[:3], device=device))


@triton.jit
def _split_kernel(
    q, pool_k, pool_v, page_table, seg_row, seg_start, seg_tokens, seg_offset, part_acc, part_max, part_total,
    P: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N_SPLITS: tl.constexpr,
    SPLIT: tl.constexpr, PAGE_TOKENS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    seg = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if tl.load(seg_tokens + seg) != 1:
        return
    kv_end = tl.load(seg_start + seg) + 1
    if split * SPLIT >= kv_end:
        return
    GROUP: tl.constexpr = H // KH
    r = tl.arange(0, M)
    lane = tl.arange(0, D)
    inside = r < GROUP
    head = kv_head * GROUP + r
    token = tl.load(seg_offset + seg).to(tl.int64)
    tile = tl.load(q + token * (H * D) + head[:, None] * D + lane[None, :], mask=inside[:, None], other=0.0)
    q_pos = tl.where(inside, kv_end - 1, -1)
    table = page_table + tl.load(seg_row + seg).to(tl.int64) * P
    first_page = split * (SPLIT // PAGE_TOKENS)
    end_page = tl.minimum(first_page + SPLIT // PAGE_TOKENS, (kv_end + PAGE_TOKENS - 1) // PAGE_TOKENS)
    m, total, acc = attend_split(
        tile, pool_k, pool_v, table, first_page, end_page, q_pos, kv_end, kv_head, KH, D, M, PAGE_TOKENS, SCALE
    )
    at = (seg.to(tl.int64) * N_SPLITS + split) * H + head
    tl.store(part_max + at, m, mask=inside)
    tl.store(part_total + at, total, mask=inside)
    tl.store(part_acc + at[:, None] * D + lane[None, :], acc, mask=inside[:, None])


@triton.jit
def _combine_kernel(
    part_acc, part_max, part_total, seg_start, seg_tokens, seg_offset, out,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N_SPLITS: tl.constexpr, SPLIT: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    seg = tl.program_id(0)
    if tl.load(seg_tokens + seg) != 1:
        return
    kv_end = tl.load(seg_start + seg) + 1
    GROUP: tl.constexpr = H // KH
    r = tl.arange(0, M)
    lane = tl.arange(0, D)
    inside = r < GROUP
    head = tl.program_id(1) * GROUP + r
    m_all = tl.full([M], float("-inf"), tl.float32)
    total_all = tl.zeros([M], tl.float32)
    acc_all = tl.zeros([M, D], tl.float32)
    for split in range((kv_end + SPLIT - 1) // SPLIT):
        at = (seg.to(tl.int64) * N_SPLITS + split) * H + head
        m = tl.load(part_max + at, mask=inside, other=0.0)
        total = tl.load(part_total + at, mask=inside, other=1.0)
        acc = tl.load(part_acc + at[:, None] * D + lane[None, :], mask=inside[:, None], other=0.0)
        m_all, total_all, acc_all = merge_split(m_all, total_all, acc_all, m, total, acc, SCALE)
    token = tl.load(seg_offset + seg).to(tl.int64)
    result = (acc_all / total_all[:, None]).to(tl.bfloat16)
    tl.store(out + token * (H * D) + head[:, None] * D + lane[None, :], result, mask=inside[:, None])


def settings(max_len: int, pages_per_row: int, n_heads: int, n_kv_heads: int, head_dim: int) -> Settings:
    """Return the launch settings of the split kernel; splits and their order follow from the model and its length."""
    group_rows(n_heads, n_kv_heads)
    split = split_tokens(max_len)
    return Settings(
        {
            "P": pages_per_row,
            "H": n_heads,
            "KH": n_kv_heads,
            "D": head_dim,
            "M": TILE_ROWS,
            "N_SPLITS": triton.cdiv(max_len, split),
            "SPLIT": split,
            "PAGE_TOKENS": PAGE,
            "SCALE": head_dim**-0.5 * LOG2_E,
        },
        num_warps=tile_warps(head_dim),
        num_stages=3,
        fp_fusion=False,
    )


def combine_settings(max_len: int, n_heads: int, n_kv_heads: int, head_dim: int) -> Settings:
    """Return the launch settings of the merge."""
    split = split_tokens(max_len)
    return Settings(
        {
            "H": n_heads,
            "KH": n_kv_heads,
            "D": head_dim,
            "M": group_rows(n_heads, n_kv_heads),
            "N_SPLITS": triton.cdiv(max_len, split),
            "SPLIT": split,
            "SCALE": head_dim**-0.5 * LOG2_E,
        },
        num_warps=2,
        num_stages=2,
        fp_fusion=False,
    )


def check_attention(
    q: torch.Tensor, pool: torch.Tensor, page_table: torch.Tensor, segments: Segments, out: torch.Tensor, max_len: int
) -> tuple[int, int, int, int]:
    """Check what both attention kernels take; return (n_segments, n_heads, n_kv_heads, head_dim)."""
    expect("q", q, torch.bfloat16, None, None, None)
    n_tokens, n_heads, head_dim = q.shape
    if head_dim not in (64, 128):
        raise ShapeError("q", f"head_dim {head_dim}", "head_dim 64 or 128")
    expect("pool", pool, torch.bfloat16, 2, None, PAGE, None, head_dim)
    n_kv = pool.shape[3]
    group_rows(n_heads, n_kv)
    expect("page_table", page_table, torch.int32, None, None)
    if page_table.shape[1] < pages_for(max_len):
        raise ShapeError("page_table", f"{page_table.shape[1]} pages a row", f"at least {pages_for(max_len)}")
    n_rows = segments.row.shape[0]
    for name, column in segments._asdict().items():
        expect(f"segments.{name}", column, torch.int32, n_rows)
    expect("out", out, torch.bfloat16, n_tokens, n_heads, head_dim)
    expect_same_device(q=q, pool=pool, page_table=page_table, out=out, **segments._asdict())
    return n_rows, n_heads, n_kv, head_dim


def decode_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    segments: Segments,
    partials: Partials,
    out: torch.Tensor,
    *,
    max_len: int,
) -> None:
    """Attend the one query of each one-token segment to its row's keys up to and including its position.

    q           bf16 [T, n_heads, head_dim], rotated
    pool        bf16 [2, n_pages, PAGE, n_kv_heads, head_dim], one layer
    page_table  int32 [n_rows, P], P * PAGE >= max_len
    segments    segments of another length than one are left alone
    partials    scratch, written
    out         bf16 [T, n_heads, head_dim], written for the tokens attended
    max_len     tokens; decides the splits, with the model's dimensions and nothing else
    Numerics    paged_block: the same bits as prefill_attention
    Ready       after the current stream; safe to capture
    Raises      ShapeError
    Source      split KV: Flash-Decoding (FlashAttention-2, arXiv:2307.08691); pages: arXiv:2309.06180
    """
    n_rows, n_heads, n_kv, head_dim = check_attention(q, pool, page_table, segments, out, max_len)
    chosen = settings(max_len, page_table.shape[1], n_heads, n_kv, head_dim)
    n_splits = chosen.constexprs["N_SPLITS"]
    expect("partials.acc", partials.acc, torch.float32, n_rows, n_splits, n_heads, head_dim)
    expect("partials.maximum", partials.maximum, torch.float32, n_rows, n_splits, n_heads)
    expect("partials.total", partials.total, torch.float32, n_rows, n_splits, n_heads)
    _split_kernel[(n_rows, n_kv, n_splits)](
        q, pool[0], pool[1], page_table, *segments, *partials, **chosen.keywords()
    )
    _combine_kernel[(n_rows, n_kv)](
        *partials, segments.start, segments.tokens, segments.offset, out,
        **combine_settings(max_len, n_heads, n_kv, head_dim).keywords(),
    )  # fmt: skip


def attend_reference(
    q: torch.Tensor, pool: torch.Tensor, page_table: torch.Tensor, segments: Segments, out: torch.Tensor, s: int
) -> None:
    """Attend segment `s` with the plain reference."""
    row, start, n, offset = (int(column[s]) for column in segments)
    pages = page_table[row, : pages_for(start + n)].long()
    k, v = (pool[i][pages].flatten(0, 1)[None].clone() for i in (0, 1))
    # The reference asks for finite values everywhere; what lies after the last key must not matter.
    k[:, start + n :], v[:, start + n :] = 0, 0
    positions = torch.arange(start, start + n, device=q.device)[None]
    queries = q[None, offset : offset + n]
    out[offset : offset + n] = attention_reference(queries, k, v, positions, q.shape[2] ** -0.5)[0]


def decode_attention_reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    segments: Segments,
    partials: Partials,  # noqa: ARG001
    out: torch.Tensor,
    *,
    max_len: int,
) -> None:
    """Do what `decode_attention` does, in plain torch."""
    check_attention(q, pool, page_table, segments, out, max_len)
    for s in range(segments.row.shape[0]):
        if int(segments.tokens[s]) == 1:
            attend_reference(q, pool, page_table, segments, out, s)


def variants(max_len: int, pages_per_row: int, n_heads: int, n_kv_heads: int, head_dim: int) -> list[Variant]:
    """List what a build compiles of this file for a model and its length."""
    columns = dict.fromkeys(("seg_start", "seg_tokens", "seg_offset"), "*i32")
    parts = dict.fromkeys(("part_acc", "part_max", "part_total"), "*fp32")
    pool = dict.fromkeys(("q", "pool_k", "pool_v"), "*bf16")
    name = f"{n_heads}/{n_kv_heads}x{head_dim}"
    return [
        Variant(
            f"decode_attention {name}",
            _split_kernel,
            {**pool, **columns, **parts, "page_table": "*i32", "seg_row": "*i32"},
            settings(max_len, pages_per_row, n_heads, n_kv_heads, head_dim),
        ),
        Variant(
            f"decode_combine {name}",
            _combine_kernel,
            {**columns, **parts, "out": "*bf16"},
            combine_settings(max_len, n_heads, n_kv_heads, head_dim),
        ),
    ]
