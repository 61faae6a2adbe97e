"""The feed-forward part's gated activation: the plain reference. Owns no state; refuses model, rows, environment."""

from __future__ import annotations

import torch


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute silu(gate) * up in float32 and round once.

    gate, up  f32 [n_tokens, ffn]
    dtype     of the result, [n_tokens, ffn]
    Source    arXiv:2002.05202
    """
    return (torch.nn.functional.silu(gate) * up).to(dtype)
