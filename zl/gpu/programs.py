"""Programs: choose and open what computes a step, and say so.

State: none; an Engine owns its buffers. Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from zl.gpu.device import Device
from zl.gpu.model import load_weights
from zl.gpu.native.build import have_compiler
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.torch_step import TorchStep
from zl.gpu.weights import WeightSource
from zl.shapes import Shapes

N_SLOTS = 2


class Engine(Protocol):
    """Compute steps: one launch, one fence.

    launch  starts the step planned in slot `slot` and returns its sequence number; steps end in launch order
    wait    blocks, without the interpreter's lock, until that step has ended and its slot's results are readable
    """

    name: str

    def launch(self, slot: int) -> int:
        """Start a step."""

    def wait(self, seq: int) -> None:
        """Wait for a step."""

    def close(self) -> None:
        """Free everything; no step may be in flight."""


class Tensors(Mapping[str, torch.Tensor]):
    """A model's tensors in one dtype, each dequantised when it is asked for, so that two copies never exist at once."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, progress: Callable[[float], None] | None = None):
        self._source = source
        self._dtype = dtype
        self._progress = progress
        self._read = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        """Dequantise one tensor; KeyError where the model has none of that name."""
        self._read += 1
        if self._progress is not None:
            self._progress(min(1.0, self._read / len(self)))
        return self._source.tensor(name, self._dtype)

    def __contains__(self, name: object) -> bool:
        """Tell whether the model has the tensor, without reading it."""
        return name in self._source.names

    def __iter__(self) -> Iterator[str]:
        """List the names."""
        return iter(self._source.names)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._source.names)


def open_engine(
    device: Device,
    source: WeightSource,
    dtype: torch.dtype,
    shapes: Shapes,
    columns: RowColumns,
    slots: list[StepSlot],
    *,
    threads: int = 0,
    level: str = "auto",
    say: Callable[[str], None],
    progress: Callable[[float], None] | None = None,
) -> Engine:
    """Load the weights and open the fastest engine this machine offers.

    level    instruction sets of the CPU program, or torch for the slow twin
    threads  CPU compute threads; 0 takes one for each core this process may use
    say      called with one line that names the engine and why it was chosen
    """
    n_threads = threads or len(os.sched_getaffinity(0))
    engine: Engine
    if device.kind != "cpu":
        say(f"program: torch, eager, on {device.name}")
        weights = load_weights(source, dtype, progress)
        engine = TorchStep(source.shape, weights, columns, slots, shapes, device=device.torch_device)
    elif level != "torch" and have_compiler():
        engine = NativeStep(
            source.shape, Tensors(source, dtype, progress), columns, slots, shapes.n_pages, shapes.step_tokens,
            n_threads, level=level, blocks=source.blocks,
        )  # fmt: skip
        say(f"program: {engine.name}, {n_threads} threads")
    else:
        why = "as asked" if level == "torch" else "no C++ compiler found (install g++ for a faster one)"
        torch.set_num_threads(n_threads)
        say(f"program: torch, eager, {n_threads} threads: {why}")
        weights = load_weights(source, dtype, progress)
        engine = TorchStep(source.shape, weights, columns, slots, shapes, device="cpu")
    return engine
