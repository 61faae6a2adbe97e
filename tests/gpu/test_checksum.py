"""zl/gpu/kernels/checksum.py and the patrol over device tensors: every flipped bit shows, wherever it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.kernel_kit import DEVICE
from zl.errors import ShapeError
from zl.gpu import device_patrol
from zl.gpu.device_patrol import DevicePatrol
from zl.gpu.graphs import PlainStream
from zl.gpu.kernels.checksum import checksum, checksum_reference


def total(start: int = 0) -> torch.Tensor:
    return torch.tensor([start], dtype=torch.int32, device=DEVICE)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20_000), st.integers(0, 1000), st.sampled_from([0, 7, -(2**31), 2**31 - 1]))
def test_checksum_equals_reference(n, seed, start):
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (n,), generator=g).to(torch.int32).to(DEVICE)
    found, wanted = total(start), total(start)
    checksum(words, found)
    checksum_reference(words, wanted)
    assert int(found) == int(wanted)


def test_what_it_does_not_take_is_refused():
    with pytest.raises(ShapeError):
        checksum(torch.zeros(0, dtype=torch.int32, device=DEVICE), total())
    with pytest.raises(ShapeError):
        checksum(torch.zeros(4, device=DEVICE), total())


def test_patrol_visits_every_word_of_every_tensor_once(monkeypatch):
    monkeypatch.setattr(device_patrol, "SLICE_BYTES", 4096)
    g = torch.Generator().manual_seed(1)
    tensors = [torch.randn(96, 64, generator=g).bfloat16(), torch.randn(3, generator=g), torch.randn(5000, generator=g)]
    tensors = [tensor.to(DEVICE) for tensor in tensors]
    patrol = DevicePatrol(tensors, PlainStream(), 60.0)
    n_slices = len(patrol._slices)
    assert n_slices > 5
    assert sum(part.numel() for parts in patrol._slices for part in parts) == sum(t.nbytes // 4 for t in tensors)
    assert patrol.pause_s == 60.0 / n_slices
    assert all(patrol.visit() for _ in range(2 * n_slices))
    assert patrol.sweep()
    for tensor in tensors:
        words = tensor.view(-1).view(torch.int32)
        for at in (0, words.numel() - 1):
            words[at] ^= 1 << 30
            assert not patrol.sweep()
            assert sum(not patrol.visit() for _ in range(n_slices)) == 1
            words[at] ^= 1 << 30
    assert patrol.sweep()


def test_a_patrol_with_no_period_has_one_slice_and_no_pause():
    patrol = DevicePatrol([torch.ones(10, device=DEVICE)], PlainStream(), 0)
    assert (patrol.pause_s, len(patrol._slices)) == (0, 1)
    assert patrol.sweep()
