"""What the kernel tests share: random packed steps over poisoned pages, and ideal tensor-core products."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from zl.gpu.kernels.decode_attention import Partials, Segments
from zl.shapes import PAGE, pages_for

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NAN = float("nan")


@contextlib.contextmanager
def exact_dots() -> Iterator[None]:
    """Make the interpreter's tile products ideal: exact, rounded once.

    NumPy's own order of summation depends on the shapes, as a tensor core's does not. With ideal products, equal bits
    tell that tiles, pages and splits are added in the same order, which is what the kernels decide. On a GPU nothing
    changes.
    """

    def create_dot(_builder, a, b, d, _precision, _imprecise):
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


def ints(values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype, device=DEVICE)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@dataclass
class AttentionCase:
    """One packed step: every slot that a segment must not read holds NaN, and so do the outputs and scratch."""

    q: torch.Tensor
    pool: torch.Tensor
    page_table: torch.Tensor
    segments: Segments
    partials: Partials
    out: torch.Tensor
    max_len: int


def attention_case(
    seed: int,
    segments: Sequence[tuple[int, int]],
    *,
    n_heads: int,
    n_kv: int,
    head_dim: int,
    max_len: int = 640,
    spare_tokens: int = 3,
) -> AttentionCase:
    """Build a step whose segment s computes `segments[s]` = (start, tokens), each in its own row, pages shuffled."""
    g = torch.Generator().manual_seed(seed)
    n_rows = len(segments)
    depth = pages_for(max_len)
    used = [pages_for(start + n) if n else 0 for start, n in segments]
    order = torch.randperm(sum(used) + 2, generator=g).tolist()
    pool = torch.full((2, len(order), PAGE, n_kv, head_dim), NAN, dtype=torch.bfloat16)
    table = torch.full((n_rows, depth), -1, dtype=torch.int32)
    rows = torch.randperm(n_rows, generator=g).tolist()
    for row, (start, n), n_pages in zip(rows, segments, used, strict=True):
        for p in range(n_pages):
            page = order.pop()
            table[row, p] = page
            written = min(PAGE, start + n - p * PAGE)
            pool[:, page, :written] = torch.randn(2, written, n_kv, head_dim, generator=g).bfloat16()
    counts = [n for _, n in segments]
    offsets = [sum(counts[:s]) for s in range(n_rows)]
    total = sum(counts) + spare_tokens
    q = torch.full((total, n_heads, head_dim), NAN, dtype=torch.bfloat16)
    q[: sum(counts)] = torch.randn(sum(counts), n_heads, head_dim, generator=g).bfloat16()
    partials = Partials(
        *(p.fill_(NAN) for p in Partials.allocate(n_rows, max_len, n_heads, head_dim, DEVICE))
    )
    return AttentionCase(
        q.to(DEVICE),
        pool.to(DEVICE),
        table.to(DEVICE),
        Segments(ints(rows), ints(start for start, _ in segments), ints(counts), ints(offsets)),
        partials,
        torch.full_like(q, NAN, device=DEVICE),
        max_len,
    )
