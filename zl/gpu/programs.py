"""Programs: choose and open what computes a step, and say so.

State: none; an Engine owns its buffers. Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from zl.errors import DeviceError
from zl.gpu import cuda_memory
from zl.gpu.device import Device
from zl.gpu.model import load_weights
from zl.gpu.native.build import have_compiler
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.torch_step import TorchStep
from zl.gpu.upload import narrate
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
    """A model's tensors in one dtype, each dequantised when it is asked for, so that two copies never exist at once.

    wide_vectors  norms and biases keep float32, as the torch twin has them
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        progress: Callable[[float], None] | None = None,
        *,
        wide_vectors: bool = False,
    ):
        self._source = source
        self._dtype = dtype
        self._wide_vectors = wide_vectors
        self._progress = progress
        self._read = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        """Dequantise one tensor; KeyError where the model has none of that name."""
        self._read += 1
        if self._progress is not None:
            self._progress(min(1.0, self._read / len(self)))
        last = name.rpartition(".")[2]
        if self._wide_vectors and (last.endswith("norm") or last.startswith("b")):
            return self._source.tensor(name, torch.float32)
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
    debug_addresses: bool = False,
) -> Engine:
    """Load the weights and open the fastest engine this machine offers.

    level    instruction sets of the CPU program, or torch for the slow twin
    threads  CPU compute threads; 0 takes one for each core this process may use
    say      called with one line that names the engine and why it was chosen
    debug_addresses  on CUDA, check before each step that nothing moved which the captured programs point at
    Raises   DeviceError where the CUDA program lacks triton
    """
    n_threads = threads or len(os.sched_getaffinity(0))
    engine: Engine
    if device.kind != "cpu" and dtype == torch.bfloat16:
        engine = _open_cuda(device, source, dtype, shapes, columns, slots, say, progress, debug_addresses)
        say(f"program: {engine.name}")
    elif device.kind != "cpu":
        say(f"program: torch, eager, on {device.name}: float32 takes the slow twin, bfloat16 is captured")
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


def _open_cuda(
    device: Device,
    source: WeightSource,
    dtype: torch.dtype,
    shapes: Shapes,
    columns: RowColumns,
    slots: list[StepSlot],
    say: Callable[[str], None],
    progress: Callable[[float], None] | None,
    debug_addresses: bool,
) -> Engine:
    try:
        from zl.gpu.cuda_step import CudaStep  # here: it brings triton, which the CPU path never loads
    except ImportError as missing:
        raise DeviceError(
            f"the CUDA program needs triton ({missing}); install the extra: pip install 'zl[cuda]', or serve with "
            "--device cpu",
            call="import",
        ) from missing
    total = cuda_memory.weight_bytes(source.shape, o_bias="layers.0.bo" in source.names)
    narrated = narrate(say, total)

    def uploaded(n_bytes: int) -> None:
        narrated(n_bytes)
        if progress is not None:
            progress(min(1.0, n_bytes / total))

    return CudaStep(
        source.shape, Tensors(source, dtype, wide_vectors=True), columns, slots, shapes, device=device.torch_device,
        progress=uploaded, debug_addresses=debug_addresses,
    )  # fmt: skip
