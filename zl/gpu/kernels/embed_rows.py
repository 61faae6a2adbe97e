"""Embedding rows: the residual stream's first value.

State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zl.gpu.kernels.launch import Settings, Variant, expect, expect_same_device


@triton.jit
def _embed_kernel(token_ids, table, x, n_live, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    if t >= tl.load(n_live):
        return
    token = tl.load(token_ids + t).to(tl.int64)
    for c in range(0, HIDDEN, BLOCK):
        lane = c + tl.arange(0, BLOCK)
        value = tl.load(table + token * HIDDEN + lane, mask=lane < HIDDEN, other=0.0)
        tl.store(x + t * HIDDEN + lane, value.to(tl.float32), mask=lane < HIDDEN)


def settings(hidden: int) -> Settings:
    """Return the launch settings for a width."""
    return Settings({"HIDDEN": hidden, "BLOCK": 1024}, 4, 1)


def _check(token_ids: torch.Tensor, table: torch.Tensor, x: torch.Tensor, n_live: torch.Tensor) -> tuple[int, int]:
    expect("x", x, torch.float32, None, None)
    n_tokens, hidden = x.shape
    expect("token_ids", token_ids, torch.int32, n_tokens)
    expect("table", table, torch.bfloat16, None, hidden)
    expect("n_live", n_live, torch.int32, 1)
    expect_same_device(x=x, token_ids=token_ids, table=table, n_live=n_live)
    return n_tokens, hidden


def embed_rows(token_ids: torch.Tensor, table: torch.Tensor, x: torch.Tensor, n_live: torch.Tensor) -> None:
    """Widen the embedding row of each live token into the residual stream.

    token_ids  int32 [T], each below the table's height (admission has checked them)
    table      bf16 [vocab, hidden]
    x          f32 [T, hidden], written up to n_live
    n_live     int32 [1], device
    Raises     ShapeError
    """
    n_tokens, hidden = _check(token_ids, table, x, n_live)
    _embed_kernel[(n_tokens,)](token_ids, table, x, n_live, **settings(hidden).keywords())


def embed_rows_reference(token_ids: torch.Tensor, table: torch.Tensor, x: torch.Tensor, n_live: torch.Tensor) -> None:
    """Do what `embed_rows` does, in plain torch."""
    _check(token_ids, table, x, n_live)
    n = int(n_live)
    x[:n] = table[token_ids[:n].long()].float()


def variants(hidden: int) -> list[Variant]:
    """List what a build compiles of this file for one width."""
    types = {"token_ids": "*i32", "table": "*bf16", "x": "*fp32", "n_live": "*i32"}
    return [Variant(f"embed_rows {hidden}", _embed_kernel, types, settings(hidden))]
