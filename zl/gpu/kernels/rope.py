"""Rotary position embedding: its tables, and the plain reference. Owns no state; refuses model, rows, environment."""

from __future__ import annotations

import math

import torch

from zl.shapes import ModelShape


def inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """Compute the angle per position of each rotation pair, f32 [head_dim / 2], with the model's scaling.

    Source  arXiv:2104.09864; Llama 3's scaling as transformers' `_compute_llama3_parameters` computes it, bit by bit
    """
    inv = 1.0 / (shape.rope_theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim))
    if shape.rope_factors is not None:
        inv = inv / torch.tensor(shape.rope_factors, dtype=torch.float32)
    scaling = shape.rope_scaling
    if scaling is None:
        return inv
    low_wavelen = scaling.original_len / scaling.low_freq_factor
    high_wavelen = scaling.original_len / scaling.high_freq_factor
    wavelen = 2 * math.pi / inv
    scaled = torch.where(wavelen > low_wavelen, inv / scaling.factor, inv)
    smooth = (scaling.original_len / wavelen - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smoothed = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    between = ~(wavelen < high_wavelen) & ~(wavelen > low_wavelen)
    return torch.where(between, smoothed, scaled)


def rope_table(shape: ModelShape, n_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (cos, sin), each f32 [n_positions, head_dim / 2]: the first half of transformers' tables.

    transformers repeats the half to head_dim; both halves of a head use the same angles.
    """
    angles = torch.arange(n_positions, dtype=torch.float32)[:, None] * inverse_frequencies(shape)
    return angles.cos(), angles.sin()


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys in float32, half-rotation layout: pair i is (i, i + head_dim / 2).

    x         f32 [n_tokens, n_heads, head_dim]
    cos, sin  f32 [n_tokens, head_dim / 2], the tables' rows at the tokens' positions
    Returns   f32, the shape of x
    """
    first, second = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), -1)
