"""zl/gpu/upload.py: bits, order and stages, over a lane that copies as late as it may."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zl.errors import ShapeError
from zl.gpu.upload import PlainLane, Uploader, narrate


class LateLane(PlainLane):
    """Copies only when waited for, so a stage that is rewritten too early shows in the bytes that arrive."""

    def __init__(self):
        self.pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.started = 0
        self.most_pending = 0

    def copy(self, target, source):
        self.started += 1
        self.pending.append((self.started, target, source))
        self.most_pending = max(self.most_pending, len(self.pending))
        return self.started

    def wait(self, fence):
        while self.pending and self.pending[0][0] <= fence:
            _, target, source = self.pending.pop(0)
            target.copy_(source)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    width=st.integers(1, 23),
    chunk=st.sampled_from([8, 16, 64, 1024]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_parts_arrive_joined_and_converted_whatever_the_chunks(rows, width, chunk, dtype):
    lane, told = LateLane(), []
    upload = Uploader(torch.device("cpu"), chunk_bytes=chunk, lane=lane, progress=told.append)
    first = [torch.randn(n, width) for n in rows]
    second = torch.randn(5).bfloat16()
    joined, vector = upload.tensor(first, dtype), upload.tensor([second], torch.float32)
    upload.close()
    assert torch.equal(joined, torch.cat(first).to(dtype))
    assert torch.equal(vector, second.float())
    assert lane.most_pending <= 2
    assert told[-1] == upload.n_bytes == joined.nbytes + vector.nbytes
    assert told == sorted(told)


def test_both_stages_are_on_their_way_at_once():
    lane = LateLane()
    upload = Uploader(torch.device("cpu"), chunk_bytes=8, lane=lane)
    upload.tensor([torch.zeros(16)], torch.float32)
    assert lane.most_pending == 2
    assert len(lane.pending) == 2
    upload.close()
    assert not lane.pending


def test_stages_that_are_not_waited_for_would_be_noticed():
    class Hasty(LateLane):
        def wait(self, fence):
            pass

    lane = Hasty()
    upload = Uploader(torch.device("cpu"), chunk_bytes=8, lane=lane)
    source = torch.arange(16.0)
    target = upload.tensor([source], torch.float32)
    upload.close()
    LateLane.wait(lane, lane.started)
    assert not torch.equal(target, source)


def test_wrong_arguments_are_refused():
    with pytest.raises(ShapeError):
        Uploader(torch.device("cpu"), chunk_bytes=12)
    with pytest.raises(ShapeError):
        Uploader(torch.device("cpu")).tensor([torch.zeros(2, 3), torch.zeros(2, 4)], torch.float32)


def test_narration_tells_each_quarter_once():
    lines, now = [], iter(range(100))
    progress = narrate(lines.append, 4_000_000_000, lambda: next(now))
    for share in range(1, 9):
        progress(share * 500_000_000)
    assert [line.split()[1] for line in lines] == ["25%", "50%", "75%", "100%"]
    assert "4.0 of 4.0 GB at 1.0 GB/s" in lines[-1]
