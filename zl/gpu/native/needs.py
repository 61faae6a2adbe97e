"""What the native step takes of memory, counted by the library that will map it: no second truth about its layouts.

State: none. Refuses torch, rows, net and asyncio.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from zl.errors import CapacityError
from zl.gpu.native import abi
from zl.gpu.native.build import library
from zl.gpu.native.packed import Packed, read_head
from zl.shapes import MAX_THREADS, PAGE, ModelShape, Shapes

Blocks = Callable[[str], tuple[str, np.ndarray] | None]
"""Gives a tensor's quantised blocks, as WeightSource.blocks does."""


def threads_of(asked: int) -> int:
    """Settle the number of compute threads: as asked, or with 0 one for each core that this process may use."""
    return asked or min(len(os.sched_getaffinity(0)), MAX_THREADS)


class Needs(NamedTuple):
    """Bytes that a native step maps: packed weights with their blocks, KV pool, scratch with row state."""

    weights: int
    pool: int
    scratch: int


def pool_bytes(shape: ModelShape, n_pages: int, kv: str) -> int:
    """Count the bytes of the native KV pool: head_dim is padded by halves to multiples of 16.

    kv  "bfloat16", "float32" or "int8", whose tokens have two scales of two bytes a head
    """
    head_pad = 2 * (-(-(shape.head_dim // 2) // 16) * 16)
    token = head_pad + 2 if kv == "int8" else head_pad * (2 if kv == "bfloat16" else 4)
    return shape.n_layers * n_pages * shape.n_kv_heads * 2 * PAGE * token


def kinds_of(shape: ModelShape, blocks: Blocks | None) -> np.ndarray:
    """Decide for each packed matrix whether it keeps its tensors' blocks: all of them must agree on the kind.

    blocks   None: of a float32 step, or of tensors that are not quantised
    Returns  zl_config.kinds, uint8 [4 * n_layers + 1]
    """
    kinds = []
    aligned = shape.head_dim % 32 == 0  # else wo's columns are padded, and blocks would be torn
    head = "embed" if shape.tied else "head"
    for names in [tuple(f"layers.{i}.{n}" for n in p) for i in range(shape.n_layers) for p in abi.PACKED] + [(head,)]:
        found = {abi.BLOCK_FORMATS.get(_format(name, blocks), (0, 0))[1] for name in names}
        torn = names[0].endswith("wo") and not aligned
        kinds.append(found.pop() if len(found) == 1 and not torn else 0)
    return np.array(kinds, np.uint8)


def config_of(
    shape: ModelShape,
    dtype: str,
    kinds: np.ndarray,
    eos: np.ndarray,
    *,
    rows: int,
    model_len: int,
    table: int,
    n_pages: int,
    step_tokens: int,
    threads: int,
    kv: str,
    bloom: bool,
) -> abi.Config:
    """Fill a zl_config; `kinds` and `eos` (int32) must outlive it. table: pages a row; kv: as in pool_bytes.

    bloom  the penalty's filter is a Bloom filter
    """
    return abi.Config(
        shape.n_layers, shape.hidden, shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.ffn, shape.vocab,
        rows, model_len, table, n_pages, step_tokens, threads, dtype == "bfloat16", kv == "int8", len(eos),
        bloom, shape.rms_eps, eos.ctypes.data, kinds.ctypes.data,
    )  # fmt: skip


def needs(
    shape: ModelShape, weights: Packed | Blocks, shapes: Shapes, dtype: str, level: str, threads: int, kv: str,
    penalty_filter: str = "exact",
) -> Needs:  # fmt: skip
    """Count what a step over `shapes` would map, rows and pages as they stand there.

    weights  an artifact's, or what gives the model's blocks
    kv       "int8", or dtype
    level    an instruction level, whose library is built where it is not there yet
    Raises   DeviceError, ModelError; CapacityError where the library refuses the sizes
    """
    if isinstance(weights, Packed):
        kinds, lib = read_head(weights.weights)[0], abi.load(weights.library)
    else:
        kinds, lib = kinds_of(shape, weights if dtype == "bfloat16" else None), abi.load(library(level))
    eos = np.array(shape.eos_ids, np.int32)
    config = config_of(
        shape, dtype, kinds, eos, rows=shapes.max_rows, model_len=shapes.max_model_len, table=shapes.pages_per_row,
        n_pages=shapes.n_pages, step_tokens=shapes.step_tokens, threads=threads, kv=kv,
        bloom=penalty_filter == "bloom",
    )  # fmt: skip
    found = (ctypes.c_size_t * 3)()
    if not lib.zl_count(ctypes.byref(config), found):
        raise CapacityError(f"the native step takes no {threads} threads, or has no memory to count with")
    return Needs(*found)


def _format(name: str, blocks: Blocks | None) -> str:
    found = blocks(name) if blocks else None
    return found[0] if found else ""
