"""Counter-based draws: Philox4x32-10 in plain Python, on torch tensors and inside Triton kernels.

A draw is a function of (seed, index) and nothing else: key = (low, high half of the seed), counter = (index, 0, 0, 0),
u = (first word >> 8) * 2**-24, so u is in [0, 1) and exact in float32.

State: none. Refuses asyncio and gpu. triton is optional: without it `philox_uniform` is None.

Source  Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011); Random123, philox.h
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zl.errors import ShapeError

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only install has no triton, and needs none
    triton = None
    tl = None

HAVE_TRITON = triton is not None

M0 = 0xD2511F53
M1 = 0xCD9E8D57
W0 = 0x9E3779B9
W1 = 0xBB67AE85
ROUNDS = 10
U_SCALE = 2.0**-24

_MASK = 0xFFFFFFFF


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the four words of one block. counter: four, key: two unsigned 32-bit integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + W0) & _MASK, (k1 + W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """Return the draw of one token. seed: counted modulo 2**64; index: the token's place in the answer."""
    word = philox4x32((index & _MASK, 0, 0, 0), (seed & _MASK, seed >> 32 & _MASK))[0]
    return (word >> 8) * U_SCALE


def seed_tensor(seed: Sequence[int] | torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return seeds as int64 [n] that carry the 64 bits of each seed, whatever sign they came with."""
    if isinstance(seed, torch.Tensor):
        # A view, not a conversion: torch has no uint64 arithmetic, the bits are what counts.
        bits = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
        return bits.to(device) if device is not None else bits
    signed = [(s & (1 << 64) - 1) - ((s & 1 << 63) << 1) for s in map(int, seed)]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def uniforms(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the draws of many tokens.

    seed    int64 [n], 64-bit patterns (`seed_tensor`)
    index   int64 or int32 [n], places in the answer
    Returns float32 [n] in [0, 1)
    Raises  ShapeError
    """
    if seed.dtype != torch.int64:
        raise ShapeError("seed", seed.dtype, torch.int64)
    if seed.shape != index.shape:
        raise ShapeError("index", tuple(index.shape), tuple(seed.shape))
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    c0 = index.to(torch.int64) & _MASK
    c1 = torch.zeros_like(c0)
    c2, c3 = c1, c1
    for _ in range(ROUNDS):
        # The product wraps modulo 2**64 in int64; masking after the arithmetic shift gives its true high word.
        p0, p1 = c0 * M0, c2 * M1
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = k0 + W0 & _MASK, k1 + W1 & _MASK
    return (c0 >> 8).to(torch.float32) * U_SCALE


philox_uniform: Any = None

if HAVE_TRITON:

    @triton.jit
    def _philox_uniform(seed_lo, seed_hi, index):  # type: ignore[no-untyped-def]
        """Return float32 draws in [0, 1). seed_lo, seed_hi, index: the same shape, taken modulo 2**32."""
        mask: tl.constexpr = 0xFFFFFFFF
        k0 = seed_lo.to(tl.uint64) & mask
        k1 = seed_hi.to(tl.uint64) & mask
        c0 = index.to(tl.uint64) & mask
        c1 = c0 & 0
        c2 = c1
        c3 = c1
        for _ in tl.static_range(10):
            p0 = c0 * 0xD2511F53
            p1 = c2 * 0xCD9E8D57
            n0 = (p1 >> 32) ^ c1 ^ k0
            n2 = (p0 >> 32) ^ c3 ^ k1
            c1 = p1 & mask
            c3 = p0 & mask
            c0 = n0
            c2 = n2
            k0 = (k0 + 0x9E3779B9) & mask
            k1 = (k1 + 0xBB67AE85) & mask
        return (c0 >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2**-24

    philox_uniform = _philox_uniform
