"""Programs: choose and open what computes a step, and say so.

State: none; an Engine owns its buffers. Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import torch

from zl.errors import ConfigError
from zl.gpu.device import Device
from zl.gpu.model import load_weights
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.torch_step import TorchStep
from zl.gpu.weights import WeightSource
from zl.shapes import Shapes

try:
    from zl.gpu.native.build import have_compiler
    from zl.gpu.native.step import NativeStep
    NATIVE = True
except ImportError:
    NATIVE = False
LEVELS = ("auto", "amx", "avx512", "avx2", "torch")


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


def open_engine(
    device: Device,
    source: WeightSource,
    dtype: torch.dtype,
    shapes: Shapes,
    columns: RowColumns,
    slots: list[StepSlot],
    *,
    threads: int = 0,
    say: Callable[[str], None],
    progress: Callable[[float], None] | None = None,
) -> Engine:
    """Load the weights and open the fastest engine this machine offers.

    threads  CPU compute threads; 0 takes one for each core this process may use
    say      called with one line that names the engine and why it was chosen
    """
    n_threads = threads or len(os.sched_getaffinity(0))
    level = os.environ.get("ZL_CPU_LEVEL", "auto")
    if level not in LEVELS:
        raise ConfigError(f"ZL_CPU_LEVEL={level!r} is not one of {', '.join(LEVELS)}")
    weights = load_weights(source, dtype, progress)
    engine: Engine
    if device.kind != "cpu":
        say(f"program: torch, eager, on {device.name}")
        engine = TorchStep(source.shape, weights, columns, slots, shapes, device=device.torch_device)
    elif level != "torch" and NATIVE and have_compiler():
        engine = NativeStep(
            source.shape, weights, columns, slots, shapes.n_pages, shapes.step_tokens, n_threads, level=level
        )
        say(f"program: {engine.name}, {n_threads} threads")
    else:
        why = "as ZL_CPU_LEVEL says" if level == "torch" else "no C++ compiler found (install g++ for a faster one)"
        torch.set_num_threads(n_threads)
        say(f"program: torch, eager, {n_threads} threads: {why}")
        engine = TorchStep(source.shape, weights, columns, slots, shapes, device="cpu")
    return engine
