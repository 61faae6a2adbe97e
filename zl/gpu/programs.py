"""Programs: choose and open what computes a step, and say so.

State: none; an Engine owns its buffers. torch is loaded only where tensors are read: packed weights open without.
Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from zl.errors import INSTALL_CUDA, DeviceError
from zl.gpu.device import Device
from zl.gpu.native.build import compiler, have_compiler, lacking, no_compiler, pick_level
from zl.gpu.native.needs import threads_of
from zl.gpu.native.packed import Packed
from zl.gpu.native.step import NativeStep
from zl.gpu.nvtx import Mark, unmarked
from zl.gpu.pinned import RowColumns, StepSlot
from zl.sampling.filter import Filter
from zl.shapes import ModelShape, Shapes

if TYPE_CHECKING:
    import torch

    from zl.gpu.weights import WeightSource

log = logging.getLogger("zl")

N_SLOTS = 2


class Engine(Protocol):
    """Compute steps: one launch, one fence.

    launch    starts the step planned in slot `slot` and returns its sequence number; steps end in launch order
    wait      blocks, without the interpreter's lock, until that step has ended and its slot's results are readable
    fallback  this is the slow twin, not a program
    """

    name: str
    fallback: bool

    def launch(self, slot: int) -> int:
        """Start a step."""

    def wait(self, seq: int) -> None:
        """Wait for a step."""

    def close(self) -> None:
        """Free everything; no step may be in flight."""


class Tensors(Mapping[str, "torch.Tensor"]):
    """A model's tensors in one dtype, each dequantised when it is asked for, so that two copies never exist at once.

    dtype  of the matrices, "bfloat16" or "float32"; norms and biases are float32 always, as in gpu.model.Weights
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: str,
        progress: Callable[[float], None] | None = None,
    ):
        self._source = source
        self._dtype = _torch_dtype(dtype)
        self._progress = progress
        self._read = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        """Dequantise one tensor; KeyError where the model has none of that name."""
        self._count()
        last = name.rpartition(".")[2]
        if last.endswith("norm") or last.startswith("b"):
            return self._source.tensor(name, _torch_dtype("float32"))
        return self._source.tensor(name, self._dtype)

    def blocks(self, name: str) -> tuple[str, np.ndarray] | None:
        """Give a tensor's quantised blocks, as WeightSource.blocks does."""
        self._count()
        return self._source.blocks(name)

    def _count(self) -> None:
        self._read += 1
        if self._progress is not None:  # most tensors are looked at twice: for their kind, and to be packed
            self._progress(min(1.0, self._read / (2 * len(self))))

    def __contains__(self, name: object) -> bool:
        """Tell whether the model has the tensor, without reading it."""
        return name in self._source.names

    def __iter__(self) -> Iterator[str]:
        """List the names."""
        return iter(self._source.names)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._source.names)


def program_of(kind: str, level: str) -> str:
    """Name what computes on a device: an instruction level of the native program, or "torch".

    kind   "cpu" or "cuda"
    level  the setting `cpu_level`
    Raises DeviceError: this CPU lacks the level, or nothing here compiles it; "auto" takes torch instead
    """
    if kind != "cpu" or level == "torch" or (level == "auto" and not have_compiler()):
        return "torch"
    picked = pick_level(level)
    if compiler() is None:
        raise no_compiler()
    return picked


def open_engine(
    device: Device,
    model: ModelShape,
    weights: WeightSource | Packed,
    dtype: str,
    shapes: Shapes,
    columns: RowColumns,
    slots: list[StepSlot],
    *,
    threads: int = 0,
    level: str = "auto",
    kv: str = "auto",
    penalty_filter: str = "exact",
    say: Callable[[str], None],
    progress: Callable[[float], None] | None = None,
    debug_addresses: bool = False,
    canary: bool = False,
    mark: Mark = unmarked,
) -> Engine:
    """Load the weights and open the fastest engine this machine offers.

    weights  an opened model, or weights packed for this build
    dtype    "bfloat16" or "float32"
    level    instruction sets of the CPU program, or torch for the slow twin
    kv       the setting: int8, of the native program alone, or auto
    penalty_filter  a kind of zl.sampling.filter
    threads  CPU compute threads; 0 takes one for each core this process may use
    say      called with one line that names the engine and why it was chosen
    debug_addresses  on CUDA, check before each step that nothing moved which the captured programs point at
    Raises   DeviceError where the CUDA program lacks triton
    """
    n_threads = threads_of(threads)
    if isinstance(weights, Packed) or program_of(device.kind, level) != "torch":
        engine = _native(model, weights, dtype, columns, slots, shapes.n_pages, shapes.step_tokens, n_threads,
                         level, progress, kv, penalty_filter)  # fmt: skip
        say(f"program: {engine.name}, {n_threads} threads")
        return engine
    if device.kind != "cpu" and dtype == "bfloat16":
        captured = _open_cuda(device, weights, dtype, shapes, columns, slots, say, progress, debug_addresses,
                              canary, mark, penalty_filter)  # fmt: skip
        say(f"program: {captured.name}")
        return captured
    import torch

    from zl.gpu.model import load_weights
    from zl.gpu.torch_step import TorchStep

    note = Filter(penalty_filter, model.vocab).note
    if device.kind != "cpu":
        # Before the first product: cuBLAS reads it when its handle is made (cuBLAS documentation, "Reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_float32_matmul_precision("highest")  # no TF32, whatever the environment says
        say(f"program: torch, eager{note}, on {device.name}: float32 takes the slow twin, bfloat16 is captured")
    else:
        if level == "torch":
            say(f"program: torch, eager{note}, {n_threads} threads: as asked")
        else:
            log.warning("program: torch, eager%s, %d threads, several times slower than the native one: %s",
                        note, n_threads, lacking())  # fmt: skip
        torch.set_num_threads(n_threads)
    loaded = load_weights(weights, _torch_dtype(dtype), progress)
    return TorchStep(
        model, loaded, columns, slots, shapes, device=device.torch_device, penalty_filter=penalty_filter
    )


def _open_cuda(
    device: Device,
    source: WeightSource,
    dtype: str,
    shapes: Shapes,
    columns: RowColumns,
    slots: list[StepSlot],
    say: Callable[[str], None],
    progress: Callable[[float], None] | None,
    debug_addresses: bool,
    canary: bool,
    mark: Mark,
    penalty_filter: str,
) -> Engine:
    try:
        from zl.gpu.cuda_step import CudaStep  # here: it brings triton, which the CPU path never loads
    except ImportError as missing:
        raise DeviceError(
            f"the CUDA program needs triton ({missing}); {INSTALL_CUDA}, or serve with --device cpu",
            call="import",
            lasting=True,
        ) from missing
    from zl.gpu import cuda_memory
    from zl.gpu.upload import narrate

    total = cuda_memory.weight_bytes(source.shape, o_bias="layers.0.bo" in source.names)
    narrated = narrate(say, total)

    def uploaded(n_bytes: int) -> None:
        narrated(n_bytes)
        if progress is not None:
            progress(min(1.0, n_bytes / total))

    return CudaStep(
        source.shape, Tensors(source, dtype), columns, slots, shapes, device=device.torch_device,
        progress=uploaded, debug_addresses=debug_addresses, canary=canary, mark=mark,
        penalty_filter=penalty_filter,
    )  # fmt: skip


def pack(
    source: WeightSource,
    dtype: str,
    max_model_len: int,
    level: str,
    out: Path,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Write the weights of a model as the native step of `level` wants them, for `Packed` to name."""
    shapes = Shapes(max_rows=1, max_model_len=max_model_len)
    columns, slots = RowColumns(shapes), [StepSlot(shapes) for _ in range(N_SLOTS)]
    n_threads = threads_of(0)
    engine = _native(source.shape, source, dtype, columns, slots, 1, 2, n_threads, level, progress)
    try:
        engine.export(out)
        if progress is not None:
            progress(1.0)
    finally:
        engine.close()


def _native(
    model: ModelShape,
    weights: WeightSource | Packed,
    dtype: str,
    columns: RowColumns,
    slots: list[StepSlot],
    n_pages: int,
    step_tokens: int,
    n_threads: int,
    level: str,
    progress: Callable[[float], None] | None,
    kv: str = "auto",
    penalty_filter: str = "exact",
) -> NativeStep:
    if isinstance(weights, Packed):
        return NativeStep(
            model, weights, columns, slots, n_pages, step_tokens, n_threads, kv=kv, penalty_filter=penalty_filter
        )
    tensors = Tensors(weights, dtype, progress)
    return NativeStep(
        model, tensors, columns, slots, n_pages, step_tokens, n_threads, level, tensors.blocks, kv, penalty_filter
    )


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
