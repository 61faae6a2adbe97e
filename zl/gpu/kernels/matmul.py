"""Matrix product with a weight: the plain reference. Owns no state; refuses model, rows, environment."""

from __future__ import annotations

import torch


def matmul_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by a weight and accumulate in float32; the caller rounds.

    x        f32 or bf16 [n_tokens, n_in]
    weight   f32 or bf16 [n_out, n_in]
    bias     f32 [n_out], added to the sum, or None
    Returns  f32 [n_tokens, n_out]
    A product of two bf16 numbers is exact in float32, so widening first changes nothing but the speed.
    """
    return torch.nn.functional.linear(x.float(), weight.float(), bias)
