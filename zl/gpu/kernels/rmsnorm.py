"""Root-mean-square norm: the plain reference. Owns no state; refuses model, rows, environment."""

from __future__ import annotations

import torch


def rmsnorm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Normalise each row in float32 and round once.

    x       f32 [n_tokens, hidden]
    weight  f32 [hidden]
    dtype   of the result, [n_tokens, hidden]
    Source  arXiv:1910.07467; the order of operations is that of transformers' LlamaRMSNorm in float32
    """
    variance = x.pow(2).mean(-1, keepdim=True)
    return (weight * (x * torch.rsqrt(variance + eps))).to(dtype)
