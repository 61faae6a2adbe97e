"""Filter update: a drawn token enters its row's exact penalty bitmap.

State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zl.gpu.kernels.launch import Settings, Variant, expect, expect_same_device, power_of_two


@triton.jit
def _filter_kernel(tokens, rows, seen, N: tl.constexpr, WORDS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.arange(0, BLOCK)
    token = tl.load(tokens + s, mask=s < N, other=-1)
    row = tl.load(rows + s, mask=s < N, other=0).to(tl.int64)
    valid = (token >= 0) & (token < VOCAB)
    # At most one segment a row, so no two lanes share a word: no atomics.
    word = seen + row * WORDS + (token >> 5)
    bits = tl.load(word, mask=valid, other=0)
    tl.store(word, bits | (tl.full([BLOCK], 1, tl.int32) << (token & 31)), mask=valid)


def settings(n: int, vocab: int) -> Settings:
    """Return the launch settings for a number of segment places."""
    block = power_of_two(n)
    return Settings(
        {"N": n, "WORDS": -(-vocab // 32), "VOCAB": vocab, "BLOCK": block}, max(1, min(8, block // 32)), num_stages=1
    )


def _check(tokens: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, vocab: int) -> int:
    expect("tokens", tokens, torch.int32, None)
    expect("rows", rows, torch.int32, tokens.shape[0])
    expect("seen", seen, (torch.int32, torch.uint32), None, -(-vocab // 32))
    expect_same_device(tokens=tokens, rows=rows, seen=seen)
    return tokens.shape[0]


def filter_update(tokens: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, *, vocab: int) -> None:
    """Set the bit of each drawn token in its row's bitmap.

    tokens  int32 [n]; outside [0, vocab): nothing was drawn, skipped
    rows    int32 [n], distinct where a token was drawn
    seen    int32 or uint32 [R, ceil(vocab / 32)], written
    Raises  ShapeError
    """
    n = _check(tokens, rows, seen, vocab)
    _filter_kernel[(1,)](tokens, rows, seen.view(torch.int32), **settings(n, vocab).keywords())


def filter_update_reference(tokens: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, *, vocab: int) -> None:
    """Do what `filter_update` does, one token at a time."""
    _check(tokens, rows, seen, vocab)
    words = seen.view(torch.int32)
    for token, row in zip(tokens.tolist(), rows.tolist(), strict=True):
        if 0 <= token < vocab:
            bit = 1 << (token & 31)
            words[row, token >> 5] |= bit - (1 << 32) if bit >> 31 else bit


def variants(n_rows: int, vocab: int) -> list[Variant]:
    """List what a build compiles of this file."""
    types = {"tokens": "*i32", "rows": "*i32", "seen": "*i32"}
    return [Variant(f"filter_update V={vocab}", _filter_kernel, types, settings(n_rows, vocab))]
