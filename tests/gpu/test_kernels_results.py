"""Sampling columns and stop check: copies and integers, so equal to their references exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.kernel_kit import DEVICE, ints
from zl.errors import ShapeError
from zl.gpu import pinned
from zl.gpu.kernels import stop_check as stop_file
from zl.gpu.kernels.context_loader import Context
from zl.gpu.kernels.sampling_columns import (
    RowSampling,
    SegmentSampling,
    gather_sampling,
    gather_sampling_reference,
)
from zl.gpu.kernels.stop_check import Draws, Results, RowLimits, stop_check, stop_check_reference
from zl.sampling.filter import KINDS, Filter

VOCAB = 1_100


def make_context(g: torch.Generator, n: int, capacity: int) -> Context:
    def column(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (n,), generator=g).to(torch.int32).to(DEVICE)

    context = Context.allocate(8, n, DEVICE)
    draws = column(-1, 2)
    skipped = torch.where(draws < 0, column(0, 2), 0).to(torch.uint8)
    return context._replace(
        seg_row=ints(torch.randperm(capacity, generator=g)[:n].tolist()),
        seg_start=column(5, 20),
        seg_tokens=column(1, 4),
        last_index=draws,
        seg_skipped=skipped,
        n_segs=ints([int(torch.randint(0, n + 1, (1,), generator=g))]),
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 7), st.integers(0, 1000), st.sampled_from([Filter(kind, VOCAB) for kind in KINDS]))
def test_gather_equals_reference(n, seed, form):
    g = torch.Generator().manual_seed(seed)
    context = make_context(g, n, n + 2)
    rows = RowSampling(
        *(torch.rand(n + 2, generator=g).to(DEVICE) for _ in range(3)),
        torch.randint(-(2**62), 2**62, (n + 2,), generator=g).to(DEVICE),
    )
    seen = torch.randint(-(2**31), 2**31, (n + 2, form.words), generator=g).to(torch.int32).to(DEVICE)
    length = ints(torch.randint(1, 5, (n + 2,), generator=g).tolist())
    found, expected = (SegmentSampling(*(t.fill_(9) for t in SegmentSampling.allocate(n, VOCAB, DEVICE))) for _ in "ab")
    gather_sampling(context, length, rows, seen, found, form)
    gather_sampling_reference(context, length, rows, seen, expected, form)
    for name, a, b in zip(SegmentSampling._fields, found, expected, strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(ShapeError):
        gather_sampling(context, length[:1], rows, seen, found, form)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(0, 100_000), st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
def test_stop_check_equals_reference(n, seed, eos):
    g = torch.Generator().manual_seed(seed)
    capacity = n + 2
    context = make_context(g, n, capacity)

    def column(low: int, high: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=g).to(dtype).to(DEVICE)

    draws = Draws(
        column(0, 8, n, torch.int64), -torch.rand(n, generator=g).to(DEVICE), column(0, 4, n, torch.int64) > 0
    )
    limits = RowLimits(
        column(1, 9, capacity, torch.int32), column(1, 30, capacity, torch.int32), column(0, 4, capacity, torch.uint8)
    )
    last, done = column(0, 9, capacity, torch.int32), column(0, 2, capacity, torch.uint8)
    outputs = (
        last, done, ints([77] * n),
        Results(ints([77] * n), torch.full((n,), 7.0, device=DEVICE), ints([77] * n, torch.uint8)),
    )  # fmt: skip
    other = (last.clone(), done.clone(), outputs[2].clone(), Results(*(t.clone() for t in outputs[3])))
    stop_check(context, draws, limits, ints(eos), *outputs)
    stop_check_reference(context, draws, limits, ints(eos), *other)
    used = int(context.n_segs)
    drew = context.last_index[:used] >= 0
    assert torch.equal(outputs[0], other[0])
    assert torch.equal(outputs[1], other[1])
    assert torch.equal(outputs[2], other[2])
    for a, b in zip(outputs[3], other[3], strict=True):
        assert torch.equal(a, b)
    assert bool((outputs[3].out_token[:used][~drew] == -1).all())
    with pytest.raises(ShapeError):
        stop_check(context, draws._replace(finite=draws.token), limits, ints(eos), *outputs)


def test_flags_are_those_of_the_columns():
    assert (stop_file.EOS, stop_file.LENGTH, stop_file.NUMERIC, stop_file.SKIPPED, stop_file.IGNORE_EOS) == (
        pinned.EOS,
        pinned.LENGTH,
        pinned.NUMERIC,
        pinned.SKIPPED,
        pinned.IGNORE_EOS,
    )
