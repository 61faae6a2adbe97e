"""Causal attention over KV pages: the plain reference; how KV is split. No state; refuses model, rows, environment."""

from __future__ import annotations

import torch

from zl.shapes import PAGE

MAX_SPLITS = 16
MIN_SPLIT = 256


def split_tokens(max_len: int) -> int:
    """Return the tokens of one KV split for a model length: whole pages, at least 256, at most 16 splits."""
    return max(MIN_SPLIT, -(-max_len // (MAX_SPLITS * PAGE)) * PAGE)


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend to every key at or before each query's position; one page's sum is added after another, in order.

    q          f32 or bf16 [n_segs, len, n_heads, head_dim], already rotated
    k, v       same dtype [n_segs, n_pages * PAGE, n_kv_heads, head_dim]; slot j holds position j
    positions  i64 [n_segs, len], of the queries
    scale      applied to the scores, 1 / sqrt(head_dim)
    Returns    the dtype and shape of q
    Numerics   scores, exponentials and sums float32; the weights exp((s - max) * scale) are rounded to q's dtype before
               they meet v; the result is rounded once. A key after its query adds an exact zero, whatever k holds
               there; v there must be finite (pages are zeroed before their first token): zero times NaN is NaN.
               So padding pages and other segments change no number that is summed.
    Source     grouped queries: arXiv:2305.13245; pages: arXiv:2309.06180
    """
    n_segs, length, n_heads, head_dim = q.shape
    n_slots, n_kv = k.shape[1], k.shape[2]
    group = n_heads // n_kv
    # [n_segs, n_kv, group * length, head_dim]: the queries that share keys become rows of one product
    rows = q.view(n_segs, length, n_kv, group, head_dim).permute(0, 2, 3, 1, 4).reshape(n_segs, n_kv, -1, head_dim)
    keys, values = k.permute(0, 2, 3, 1).float(), v.permute(0, 2, 1, 3).float()
    scores = (rows.float() @ keys).view(n_segs, n_kv, group, length, n_slots)
    hidden = torch.arange(n_slots, device=q.device) > positions[:, None, None, :, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = ((scores - scores.amax(-1, keepdim=True)) * scale).exp().view(n_segs, n_kv, group * length, n_slots)
    total = torch.zeros(n_segs, n_kv, group * length, 1, device=q.device)
    out = torch.zeros(n_segs, n_kv, group * length, head_dim, device=q.device)
    for start in range(0, n_slots, PAGE):
        page = weights[..., start : start + PAGE]
        total += page.sum(-1, keepdim=True)
        out += page.to(q.dtype).float() @ values[:, :, start : start + PAGE]
    out = (out / total).view(n_segs, n_kv, group, length, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(q.shape).to(q.dtype)
