"""Checksum: the sum of a tensor's 32-bit words, modulo 2**32, added to a counter on the device.

Additions of integers commute, so the order in which programs add does not matter; one flipped bit changes the sum.
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

MOST_WORDS = 1 << 30
"""Words of one launch: offsets in the kernel are 32-bit."""


# Not specialised: one binary serves all lengths.
@triton.jit(do_not_specialize=["n"])
def _checksum_kernel(words, total, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # In 64 bits, then cut: the interpreters of Triton 3.6 to 3.8 refuse a 32-bit sum that wraps around.
    part = tl.sum(tl.load(words + at, mask=at < n, other=0).to(tl.int64), 0)
    tl.atomic_add(total, part.to(tl.int32), sem="relaxed")


def settings() -> Settings:
    """Return the launch settings."""
    return Settings({"BLOCK": 8192}, 8, 1)


def _check(words: torch.Tensor, total: torch.Tensor) -> int:
    expect("words", words, torch.int32, None)
    expect("total", total, torch.int32, 1)
    if not 0 < words.shape[0] <= MOST_WORDS:
        raise ShapeError("words", words.shape[0], f"1 to {MOST_WORDS} words")
    expect_same_device(words=words, total=total)
    return words.shape[0]


def checksum(words: torch.Tensor, total: torch.Tensor) -> None:
    """Add the sum of `words` to `total`, wrapping around.

    words   int32 [n], 0 < n <= MOST_WORDS
    total   int32 [1], device, added to
    Ready   after the current stream
    Raises  ShapeError
    """
    n = _check(words, total)
    chosen = settings()
    _checksum_kernel[(triton.cdiv(n, chosen.constexprs["BLOCK"]),)](words, total, n, **chosen.keywords())


def checksum_reference(words: torch.Tensor, total: torch.Tensor) -> None:
    """Do what `checksum` does, in plain torch."""
    _check(words, total)
    value = (int(words.long().sum()) + int(total)) % (1 << 32)
    total.fill_(value - (1 << 32) if value >> 31 else value)


def variants() -> list[Variant]:
    """List what a build compiles of this file."""
    return [Variant("checksum", _checksum_kernel, {"words": "*i32", "total": "*i32", "n": "i32"}, settings())]
