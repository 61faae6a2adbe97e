"""The patrol over weights on a device: sums of 32-bit words, a slice at a time, by a kernel.

State: golden sums, and one counter on the device. Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zl.gpu.graphs import Stream
from zl.gpu.heartbeat import SHORTEST_PAUSE_S
from zl.gpu.kernels.checksum import MOST_WORDS, checksum

SLICE_BYTES = 64 << 20
"""Summed between two steps: about 50 us at an A100's bandwidth, if it reaches it. Not measured."""


class DevicePatrol:
    """Sums over tensors that no step writes; as heartbeat.Patrol. No step in flight. # sync

    tensors   contiguous, of whole 32-bit words, all on one device
    period_s  time in which every slice is to be visited once
    """

    def __init__(self, tensors: Iterable[torch.Tensor], stream: Stream, period_s: float):
        words = [tensor.detach().reshape(-1).view(torch.int32) for tensor in tensors]
        self._stream = stream
        self._total = torch.zeros(1, dtype=torch.int32, device=words[0].device)
        stream.settle()  # the zero was ordered on another stream
        n_bytes = 4 * sum(part.numel() for part in words)
        most = max(1, int(period_s / SHORTEST_PAUSE_S)) if period_s else 1
        count = min(most, -(-n_bytes // SLICE_BYTES))
        self._slices = _cut(words, -(-n_bytes // (4 * count)))
        self._golden = [self._sum(part) for part in self._slices]
        self._next = 0
        self.pause_s = period_s / len(self._slices)

    def visit(self) -> bool:
        """Sum the next slice; False where it changed."""
        i, self._next = self._next, (self._next + 1) % len(self._slices)
        return self._sum(self._slices[i]) == self._golden[i]

    def sweep(self) -> bool:
        """Sum every slice; False where one changed."""
        return all(self._sum(part) == golden for part, golden in zip(self._slices, self._golden, strict=True))

    def _sum(self, parts: list[torch.Tensor]) -> int:
        found: list[int] = []

        def work() -> None:
            self._total.zero_()
            for part in parts:
                checksum(part, self._total)
            found.append(int(self._total))  # sync

        self._stream.run(work)
        return found[0]


def _cut(words: list[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    """Cut tensors into slices of `size` words, the last shorter; a slice may span tensors, and none is copied."""
    slices: list[list[torch.Tensor]] = [[]]
    room = size
    for part in words:
        at = 0
        while at < part.numel():
            n = min(room, part.numel() - at, MOST_WORDS)
            slices[-1].append(part[at : at + n])
            at, room = at + n, room - n
            if not room:
                slices.append([])
                room = size
    if not slices[-1]:
        slices.pop()
    return slices
