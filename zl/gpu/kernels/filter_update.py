"""Filter update: a drawn token enters its row's penalty filter; and the filter's bits for all kernels.

`zl.sampling.filter` says what the bits are. State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from zl.gpu.kernels.launch import Settings, Variant, expect, expect_same_device, power_of_two
from zl.sampling.filter import HASHES, LINE, Filter

_H0, _H1, _H2, _H3 = (tl.constexpr(factor) for factor in HASHES)
_LINE = tl.constexpr(LINE)


@triton.jit
def place(block, FACTOR: tl.constexpr):
    """Hash blocks of 32 ids: the word of a Bloom filter that each is in, and that word's rotation."""
    product = ((block // _LINE + 1).to(tl.uint32) * FACTOR).to(tl.uint32)
    return (product >> 26).to(tl.int32) * _LINE + block % _LINE, (product >> 21) & 31


@triton.jit
def _set_hashed(words, token, valid, FACTOR: tl.constexpr):
    word, turn = place(token >> 5, FACTOR)
    bit = tl.full(token.shape, 1, tl.int32) << ((token + turn.to(tl.int32)) & 31)
    tl.atomic_or(words + word, bit, mask=valid, sem="relaxed")


@triton.jit
def add_to_bloom(words, token, valid):
    """Set the tokens' bits in Bloom filters at `words`, a pointer or one a token."""
    _set_hashed(words, token, valid, _H0)
    _set_hashed(words, token, valid, _H1)
    _set_hashed(words, token, valid, _H2)
    _set_hashed(words, token, valid, _H3)


@triton.jit
def _read_hashed(words, block, valid, FACTOR: tl.constexpr):
    word, turn = place(block, FACTOR)
    x = tl.load(words + word, mask=valid, other=0).to(tl.uint32, bitcast=True)
    return (x >> turn) | (x << ((32 - turn) & 31))


@triton.jit
def bloom_bitmap(words, block, valid, VOCAB: tl.constexpr):
    """Give words of the bitmap that a Bloom filter at `words` stands for, int32; none of its bits is past VOCAB."""
    found = _read_hashed(words, block, valid, _H0) & _read_hashed(words, block, valid, _H1)
    found = found & _read_hashed(words, block, valid, _H2) & _read_hashed(words, block, valid, _H3)
    inside = tl.where(block == VOCAB // 32, (1 << (VOCAB % 32)) - 1, -1)
    return found.to(tl.int32, bitcast=True) & inside


@triton.jit
def _filter_kernel(
    tokens, rows, seen,
    N: tl.constexpr, WORDS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOOM: tl.constexpr,
):  # fmt: skip
    s = tl.arange(0, BLOCK)
    token = tl.load(tokens + s, mask=s < N, other=-1)
    row = tl.load(rows + s, mask=s < N, other=0).to(tl.int64)
    valid = (token >= 0) & (token < VOCAB)
    if BLOOM:
        add_to_bloom(seen + row * WORDS, token, valid)
    else:
        # At most one segment a row, so no two lanes share a word: no atomics.
        word = seen + row * WORDS + (token >> 5)
        bits = tl.load(word, mask=valid, other=0)
        tl.store(word, bits | (tl.full([BLOCK], 1, tl.int32) << (token & 31)), mask=valid)


def settings(n: int, form: Filter) -> Settings:
    """Return the launch settings for a number of segment places."""
    block = power_of_two(n)
    constants = {"N": n, "WORDS": form.words, "VOCAB": form.vocab, "BLOCK": block, "BLOOM": form.bloom}
    return Settings(constants, max(1, min(8, block // 32)), num_stages=1)


def _check(tokens: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, form: Filter) -> int:
    expect("tokens", tokens, torch.int32, None)
    expect("rows", rows, torch.int32, tokens.shape[0])
    expect("seen", seen, (torch.int32, torch.uint32), None, form.words)
    expect_same_device(tokens=tokens, rows=rows, seen=seen)
    return tokens.shape[0]


def filter_update(tokens: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, form: Filter) -> None:
    """Add each drawn token to its row's filter.

    tokens  int32 [n]; outside [0, vocab): nothing was drawn, skipped
    rows    int32 [n], distinct where a token was drawn
    seen    int32 or uint32 [R, form.words], written
    Raises  ShapeError
    """
    n = _check(tokens, rows, seen, form)
    _filter_kernel[(1,)](tokens, rows, seen.view(torch.int32), **settings(n, form).keywords())


def filter_update_reference(tokens: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, form: Filter) -> None:
    """Do what `filter_update` does, one token at a time."""
    _check(tokens, rows, seen, form)
    for token, row in zip(tokens.tolist(), rows.tolist(), strict=True):
        add_reference(seen[row], [token], form)


def add_reference(row: torch.Tensor, ids: list[int], form: Filter) -> None:
    """Add ids to one row's filter, int32 or uint32 [form.words], in place, by `zl.sampling.filter`."""
    words = row.cpu().view(torch.int32).numpy().view(np.uint32).copy()
    form.add(words, np.array(ids, np.int64))
    row.view(torch.int32).copy_(torch.from_numpy(words.view(np.int32)))


def variants(n_rows: int, form: Filter) -> list[Variant]:
    """List what a build compiles of this file."""
    types = {"tokens": "*i32", "rows": "*i32", "seen": "*i32"}
    return [Variant(f"filter_update {form.kind} V={form.vocab}", _filter_kernel, types, settings(n_rows, form))]
