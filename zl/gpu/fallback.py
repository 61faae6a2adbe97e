"""The fallback: the torch twin over a native context's own KV pool and row state, so that running rows go on.

State: weights of its own, loaded anew; everything else belongs to the native context. Correct before fast: a step takes
several times the native one. Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from zl.gpu.model import Weights
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.pool import KVPool
from zl.gpu.source import canonical_shapes
from zl.gpu.torch_step import Sample, TorchStep
from zl.shapes import PAGE, Shapes


class NativePool(KVPool):
    """The native KV pool behind the torch pool's surface: the same pages, in the layout that the native step reads.

    data  [n_layers, n_pages, n_kv_heads, page_elems], a view of native memory; no native step may be in flight
    """

    def __init__(self, native: NativeStep):
        self.n_pages = native.n_pages
        data, k_at, v_at = native.pool()
        self.data = _tensor(data)
        self._k_at, self._v_at = torch.from_numpy(k_at).long(), torch.from_numpy(v_at).long()
        self._heads = torch.arange(native.shape.n_kv_heads)[None, :, None]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write one layer's new keys and values; as KVPool.write."""
        page = (slots // PAGE)[:, None, None]
        offset = slots % PAGE
        self.data[layer][page, self._heads, self._k_at[offset][:, None]] = k
        self.data[layer][page, self._heads, self._v_at[offset][:, None]] = v

    def read(self, layer: int, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather one layer's pages; as KVPool.read."""
        pages = self.data[layer][page_ids]
        return self._tokens(pages, self._k_at), self._tokens(pages, self._v_at)

    def zero(self, page_ids: torch.Tensor) -> None:
        """Clear whole pages, padding included, in all layers."""
        self.data[:, page_ids] = 0

    @staticmethod
    def _tokens(pages: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Unpack [..., n, n_kv_heads, page_elems] to [..., n * PAGE, n_kv_heads, head_dim]."""
        return pages[..., at].transpose(-3, -2).flatten(-4, -3)


class NativePool8(NativePool):
    """The same of a pool in eight bits: a token is quantised to the bits that kv8.hpp makes of it.

    data  int8 [n_layers, n_pages, n_kv_heads, page_bytes]: PAGE bf16 scales of keys, as many of values, then numbers
    """

    def __init__(self, native: NativeStep):
        super().__init__(native)
        pairs = self.data.view(torch.bfloat16)
        self._scales = pairs[..., :PAGE], pairs[..., PAGE : 2 * PAGE]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Quantise and write one layer's new keys and values; as KVPool.write."""
        page, offset = (slots // PAGE)[:, None], slots % PAGE
        for x, scales, at in zip((k, v), self._scales, (self._k_at, self._v_at), strict=True):
            numbers, scale = quantise(x)
            scales[layer][page, self._heads[..., 0], offset[:, None]] = scale
            self.data[layer][page[..., None], self._heads, at[offset][:, None]] = numbers

    def read(self, layer: int, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather one layer's pages as numbers times scales, f32; as KVPool.read."""
        k, v = (
            self._tokens(self.data[layer][page_ids], at) * scales[layer][page_ids].float().mT.flatten(-3, -2)[..., None]
            for scales, at in zip(self._scales, (self._k_at, self._v_at), strict=True)
        )
        return k, v


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give what kv8.hpp keeps of bf16 rows [..., n]: int8 [..., n] and the scales, bf16 [...].

    A scale is the largest absolute value over 127; a row that is not finite has a NaN for one, a row below 2^-60 zeros.
    """
    most = x.abs().amax(-1).float()
    scale = (most / 127).bfloat16()
    scale = torch.where(torch.isfinite(most), scale, torch.nan).masked_fill(most < 2.0**-60, 0)
    by = torch.where(scale > 0, 1 / scale.float(), 0.0)
    return (x.float().nan_to_num(0, 0, 0) * by[..., None]).round().to(torch.int8), scale


def open_pool(native: NativeStep) -> NativePool:
    """Lay the pool of its kind over a native context's keys and values."""
    return NativePool8(native) if native.kv == "int8" else NativePool(native)


class EagerStep(TorchStep):
    """Run steps in torch where `native` left off: its pages and its state of the rows are used in place.

    weights  in the native step's dtype, from the model's file and not from the native context
    widen    keep float32 copies of bf16 weights
    """

    name = "torch, eager, over the native KV pool"

    def __init__(
        self,
        native: NativeStep,
        weights: Weights,
        columns: RowColumns,
        slots: Sequence[StepSlot],
        shapes: Shapes,
        *,
        pool: NativePool | None = None,
        widen: bool = True,
        sample: Sample | None = None,
    ):
        self._native = native
        super().__init__(
            native.shape, weights, columns, slots, shapes, sample=sample, pool=pool or open_pool(native), widen=widen,
            penalty_filter=native.filter.kind,
        )  # fmt: skip

    def _open_rows(self, n_rows: int, n_positions: int) -> None:  # noqa: ARG002
        self._last_token = self._native.last_token
        self._done = self._native.done
        self._seen = self._native.seen
        self._prompt_ids = self._native.prompt_ids


def unpacked(native: NativeStep, progress: Callable[[float], None]) -> Weights:
    """Copy all tensors out of a native step's packed weights: the same values that were packed, bit for bit."""
    shape = native.shape
    matrix = np.uint16 if native.dtype == "bfloat16" else np.float32
    tensors: dict[str, torch.Tensor] = {}
    dims = list(canonical_shapes(replace(shape, attention_bias=True, mlp_bias=True), True))
    for done, (name, size) in enumerate(dims, 1):
        layer, _, short = name.removeprefix("layers.").rpartition(".")
        out = np.empty(size, matrix if len(size) == 2 else np.float32)
        if native.unpack(short, int(layer or 0), out):
            tensors[name] = _tensor(out)
        progress(done / len(dims))
    return Weights(shape, torch.bfloat16 if native.dtype == "bfloat16" else torch.float32, tensors)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Lay a tensor over an array; uint16 stands for bf16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
