"""The KV pool: one tensor for all layers and pages, made once.

Owns that tensor. Refuses rows, pages (their books), net, asyncio.
"""

from __future__ import annotations

import torch

from zl.errors import ShapeError
from zl.shapes import PAGE, ModelShape


class KVPool:
    """Keys and values in pages, all in `data` [n_layers, 2, n_pages, PAGE, n_kv_heads, head_dim].

    A page's content is undefined until `zero`: zero it before its first token is written.
    """

    def __init__(self, shape: ModelShape, n_pages: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.n_pages = n_pages
        self.data = torch.empty(
            shape.n_layers, 2, n_pages, PAGE, shape.n_kv_heads, shape.head_dim, dtype=dtype, device=device
        )

    @staticmethod
    def page_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
        """Count the bytes of one page over all layers."""
        return shape.n_layers * 2 * PAGE * shape.n_kv_heads * shape.head_dim * dtype.itemsize

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write one layer's new keys and values.

        slots  i64 [n_tokens], page * PAGE + offset, each at most once
        k, v   [n_tokens, n_kv_heads, head_dim], the pool's dtype
        """
        if k.dtype != self.data.dtype or v.dtype != self.data.dtype:
            raise ShapeError("k, v", (k.dtype, v.dtype), self.data.dtype)
        self.data[layer, 0].flatten(0, 1)[slots] = k
        self.data[layer, 1].flatten(0, 1)[slots] = v

    def read(self, layer: int, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather one layer's pages: page_ids i64 [..., n] → k, v [..., n * PAGE, n_kv_heads, head_dim]."""
        k, v = self.data[layer, 0][page_ids], self.data[layer, 1][page_ids]
        return k.flatten(-4, -3), v.flatten(-4, -3)

    def zero(self, page_ids: torch.Tensor) -> None:
        """Clear whole pages, i64 [n], in all layers, so that nothing stale can reach their next owner."""
        self.data[:, :, page_ids] = 0
