"""Weights on their way to the device: large chunks through two page-locked stages, used in turn.

While one stage is copied by the device, the next chunk is read from the mapped file into the other, so that the disk or
the bus is the limit and never both in sequence. State: the two stages, given back by `close`.
Refuses rows, net, asyncio and triton.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from zl.errors import ShapeError

CHUNK_BYTES = 64 << 20

Progress = Callable[[int], None]
"""Called with the bytes that have been handed to the device so far."""


class Lane(Protocol):
    """The device's side of an upload; steps end in the order they are started in.

    stage  gives uint8 [n_bytes] of host memory that copies start from
    copy   starts a copy from a stage into device memory and returns its fence
    wait   blocks until that copy no longer reads its stage
    """

    def stage(self, n_bytes: int) -> torch.Tensor:
        """Allocate a stage."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy."""

    def wait(self, fence: Any) -> None:
        """Wait for a copy."""


class PlainLane:
    """Memory to memory, at once: the CPU device and the dry mode."""

    def stage(self, n_bytes: int) -> torch.Tensor:
        """Allocate a stage in plain memory."""
        return torch.empty(n_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def wait(self, fence: None) -> None:
        """Nothing is ever on its way."""


class CudaLane:
    """A stream of its own and page-locked stages. Not yet run on hardware: docs/gpu-status.md."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def stage(self, n_bytes: int) -> torch.Tensor:
        """Allocate a page-locked stage."""
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Start a copy; the target's memory may have had an earlier user on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, fence: torch.cuda.Event) -> None:
        """Wait for one copy, not for the device."""
        fence.synchronize()  # sync


class Uploader:
    """Place tensors on a device, converted on the way.

    device       where they go
    chunk_bytes  size of each of the two stages
    progress     called after each chunk
    lane         None takes the device's own
    """

    def __init__(
        self,
        device: torch.device,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        progress: Progress | None = None,
        lane: Lane | None = None,
    ):
        if chunk_bytes < 8 or chunk_bytes % 8:
            raise ShapeError("chunk_bytes", chunk_bytes, "a multiple of 8")
        self._device = device
        self._progress = progress
        self._lane: Lane = lane or (PlainLane() if device.type == "cpu" else CudaLane(device))
        self._stages = [self._lane.stage(chunk_bytes) for _ in range(2)]
        self._fences: list[Any] = [None, None]
        self._busy = [False, False]
        self._turn = 0
        self.n_bytes = 0

    def tensor(
        self, parts: Sequence[torch.Tensor], dtype: torch.dtype, *, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Join `parts` along their first dimension into one contiguous tensor of `dtype` on the device.

        into  a contiguous tensor of that dtype and size, overwritten in place; nothing in flight may read it
        Readable after `close`, or after the fence of the device's own order. Parts that lie on the device already are
        copied there. Raises ShapeError where their other dimensions, or those of `into`, differ.
        """
        rest = parts[0].shape[1:]
        for part in parts:
            if part.shape[1:] != rest:
                raise ShapeError("parts", tuple(part.shape), f"[n, {', '.join(map(str, rest))}]")
        size = (sum(p.shape[0] for p in parts), *rest)
        if into is not None and (tuple(into.shape) != size or into.dtype != dtype or not into.is_contiguous()):
            raise ShapeError("into", f"{into.dtype} {tuple(into.shape)}", f"{dtype} {size}, contiguous")
        target = torch.empty(size, dtype=dtype, device=self._device) if into is None else into
        flat, at = target.view(-1), 0
        for part in parts:
            if part.device == target.device and part.device.type != "cpu":
                flat[at : at + part.numel()].copy_(part.reshape(-1))
                self._tell(part.numel() * dtype.itemsize)
            else:
                self._send(part.detach().reshape(-1), flat[at : at + part.numel()])
            at += part.numel()
        return target

    def close(self) -> None:
        """Wait for what is on its way and give the stages back."""
        for turn in range(2):
            self._settle(turn)
        self._stages.clear()

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        step = self._stages[0].numel() // target.dtype.itemsize
        for start in range(0, source.numel(), step):
            turn, self._turn = self._turn, 1 - self._turn
            self._settle(turn)
            n = min(step, source.numel() - start)
            stage = self._stages[turn].view(target.dtype)[:n]
            stage.copy_(source[start : start + n])
            self._fences[turn] = self._lane.copy(target[start : start + n], stage)
            self._busy[turn] = True
            self._tell(n * target.dtype.itemsize)

    def _settle(self, turn: int) -> None:
        if self._busy[turn]:
            self._lane.wait(self._fences[turn])
            self._busy[turn], self._fences[turn] = False, None

    def _tell(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        if self._progress is not None:
            self._progress(self.n_bytes)


def narrate(say: Callable[[str], None], total: int, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Make a progress callback that says a line at each quarter, with the speed so far.

    total  bytes of the whole upload
    """
    begun = clock()
    told = 0

    def progress(n_bytes: int) -> None:
        nonlocal told
        quarter = 4 * n_bytes // max(1, total)
        if quarter > told:
            told = quarter
            speed = n_bytes / max(1e-9, clock() - begun)
            share = min(100, 100 * n_bytes // max(1, total))
            say(f"weights: {share}% uploaded, {n_bytes / 1e9:.1f} of {total / 1e9:.1f} GB at {speed / 1e9:.1f} GB/s")

    return progress
