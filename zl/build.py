"""The build: decide everything that can be decided before a request arrives, and hash what decides an output.

State: none; `prepare` returns one frozen Build. Refuses net, dispatch and asyncio, and within gpu the loop and staging.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import zl
from zl.config import Settings
from zl.errors import CapacityError, ConfigError
from zl.gpu import cuda_memory
from zl.gpu.device import Device, open_device
from zl.gpu.weights import WeightSource, open_model
from zl.sampling import profiles
from zl.shapes import PAGE, ModelShape, Shapes, pages_for
from zl.text.prompt import PromptBuilder
from zl.text.tokenizer import TextModel, text_model

CPU_KV_BYTES = 2 << 30
"""Upper bound of the KV pool on a CPU when no size is given: 91 thousand tokens of the default model."""

RESERVE_BYTES = 256 << 20
"""Memory left for the process itself when the pool's size is chosen."""

CUDA_RESERVE_BYTES = 1 << 30
"""Device memory left alone: the allocator rounds every tensor above 1 MiB up to 2 MiB, and others may hold some too."""


@dataclass(frozen=True)
class MemoryPlan:
    """Where the device's memory goes, in bytes."""

    weights: int
    kv_pool: int
    columns: int
    free_before: int
    programs: int = 0
    buffers: int = 0
    reserve: int = 0
    on_device: bool = False

    def line(self, n_pages: int) -> str:
        """Say it in one line."""
        if self.on_device:
            return (
                f"memory: weights {_size(self.weights)}, KV pool {_size(self.kv_pool)} ({n_pages} pages, "
                f"{n_pages * PAGE:,} tokens), programs {_size(self.programs)} (estimate), buffers "
                f"{_size(self.buffers)}, reserve {_size(self.reserve)}, of {_size(self.free_before)} free; "
                f"columns {_size(self.columns)} in page-locked host memory"
            )
        return (
            f"memory: weights {_size(self.weights)}, KV pool {_size(self.kv_pool)} ({n_pages} pages, "
            f"{n_pages * PAGE:,} tokens), columns {_size(self.columns)}, {_size(self.free_before)} free before"
        )


@dataclass(frozen=True)
class Build:
    """All that serving needs, decided."""

    settings: Settings
    device: Device
    source: WeightSource
    model: ModelShape
    text: TextModel
    prompts: PromptBuilder
    shapes: Shapes
    dtype: torch.dtype
    memory: MemoryPlan
    build_id: str


def prepare(settings: Settings, path: Path, say: Callable[[str], None]) -> Build:
    """Open the model and the device and decide the shapes.

    say     called with one line a decision
    Raises  ModelError, ConfigError, CapacityError, DeviceError: one line each
    """
    device, why = open_device(settings.device)
    say(why)
    source = open_model(path)
    model = source.shape
    text = text_model(source)
    if text.vocab_size > model.vocab:
        raise ConfigError(
            f"{path}: the tokenizer has {text.vocab_size} ids, the embedding {model.vocab} rows; the file is not whole"
        )
    dtype = _dtype(settings.dtype)
    max_model_len = min(settings.max_model_len, model.max_position)
    shapes = Shapes(
        max_rows=settings.max_rows,
        max_model_len=max_model_len,
        max_tokens=min(settings.max_tokens, max_model_len - 1),
        default_tokens=min(settings.default_tokens, max_model_len - 1),
        system_tokens=settings.system_tokens,
        context_tokens=settings.context_tokens,
        step_tokens=settings.step_tokens,
    )
    n_pages, memory = plan_memory(settings, model, shapes, device, dtype)
    shapes = Shapes(**{name: getattr(shapes, name) for name in Shapes.__dataclass_fields__} | {"n_pages": n_pages})
    say(memory.line(n_pages))
    prompts = PromptBuilder(text, shapes, on_over=settings.over_budget)
    return Build(
        settings, device, source, model, text, prompts, shapes, dtype, memory, build_id(source, text, dtype, device)
    )


def page_bytes(model: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of one page of K and V over all layers."""
    return 2 * model.n_layers * PAGE * model.n_kv_heads * model.head_dim * dtype.itemsize


def weight_bytes(model: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of the weights in `dtype`; a tied head is counted twice, since programs pack it for themselves."""
    attention = model.hidden * model.head_dim * 2 * (model.n_heads + model.n_kv_heads)
    layer = attention + 3 * model.hidden * model.ffn + 2 * model.hidden
    return (model.n_layers * layer + 2 * model.vocab * model.hidden + model.hidden) * dtype.itemsize


def plan_memory(
    settings: Settings, model: ModelShape, shapes: Shapes, device: Device, dtype: torch.dtype
) -> tuple[int, MemoryPlan]:
    """Choose the number of KV pages; CapacityError, with the numbers, where not even one full row fits."""
    if device.kind != "cpu" and dtype == torch.bfloat16:
        return _plan_cuda(settings, model, shapes, device)
    free, _ = device.memory()
    page = page_bytes(model, dtype)
    weights = weight_bytes(model, dtype)
    columns = shapes.max_rows * (4 * shapes.max_model_len + 4 * shapes.pages_per_row + model.vocab // 8)
    left = free - weights - columns - RESERVE_BYTES
    all_rows = shapes.max_rows * shapes.pages_per_row * page
    if settings.kv_memory:
        kv = settings.kv_memory
        if kv > left:
            raise CapacityError(
                f"kv_memory {_size(kv)} does not fit: {_size(free)} are free, weights need {_size(weights)}, "
                f"columns {_size(columns)}, reserve {_size(RESERVE_BYTES)}; at most {_size(max(0, left))} are left"
            )
    else:
        share = left // 2 if device.kind == "cpu" else int(left * 0.9)
        kv = min(all_rows, share, CPU_KV_BYTES) if device.kind == "cpu" else min(all_rows, share)
    n_pages = max(0, kv) // page
    if n_pages < shapes.pages_per_row:
        raise CapacityError(
            f"a KV pool of {_size(max(0, kv))} holds {n_pages * PAGE} tokens, one request of max_model_len "
            f"{shapes.max_model_len} needs {_size(pages_for(shapes.max_model_len) * page)}: raise --kv-memory or lower "
            f"--max-model-len"
        )
    return n_pages, MemoryPlan(weights, n_pages * page, columns, free)


def _plan_cuda(settings: Settings, model: ModelShape, shapes: Shapes, device: Device) -> tuple[int, MemoryPlan]:
    """Plan the captured program's memory: what it allocates is known to the byte, but for the programs themselves."""
    free, _ = device.memory()
    page = page_bytes(model, torch.bfloat16)
    weights = cuda_memory.weight_bytes(model, o_bias=model.attention_bias)
    programs = cuda_memory.program_bytes(model, shapes)
    buffers = cuda_memory.buffer_bytes(model, shapes)
    columns = shapes.max_rows * (4 * shapes.max_model_len + 4 * shapes.pages_per_row + 33)
    left = free - weights - programs - buffers - CUDA_RESERVE_BYTES
    least = shapes.pages_per_row * page
    wanted = settings.kv_memory or min(shapes.max_rows * least, left)
    if wanted > left or left < least:
        raise CapacityError(
            f"{model.name} does not fit {device.name}: {_size(free)} free, weights {_size(weights)}, programs "
            f"{_size(programs)} (estimate), buffers {_size(buffers)}, reserve {_size(CUDA_RESERVE_BYTES)} leave "
            f"{_size(max(0, left))} for the KV pool, "
            + (f"kv_memory asks for {_size(settings.kv_memory)}" if settings.kv_memory else "")
            + ("; " if settings.kv_memory and left < least else "")
            + (f"one request of max_model_len {shapes.max_model_len} needs {_size(least)}" if left < least else "")
            + ": lower --max-model-len, --step-tokens, --max-rows or --kv-memory, or take a smaller model"
        )
    n_pages = wanted // page
    if n_pages < shapes.pages_per_row:
        raise CapacityError(
            f"kv_memory {_size(wanted)} holds {n_pages * PAGE} tokens, one request of max_model_len "
            f"{shapes.max_model_len} needs {_size(least)}: raise --kv-memory or lower --max-model-len"
        )
    return n_pages, MemoryPlan(
        weights, n_pages * page, columns, free, programs, buffers, CUDA_RESERVE_BYTES, on_device=True
    )


def build_id(source: WeightSource, text: TextModel, dtype: torch.dtype, device: Device) -> str:
    """Hash all that decides an output: weights, tokenizer, template, profiles, code, versions, processor features."""
    facts = {
        "weights": source.sha256,
        "text": text.sha256,
        "dtype": str(dtype),
        "device": device.kind,
        "machine": _processor(device),
        "profiles": profiles.HASH,
        "code": _code_hash(),
        "versions": {"zl": zl.__version__, "torch": torch.__version__, "numpy": np.__version__},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _code_hash() -> str:
    """Hash the sources that compute: all but the wire, the command line and the plumbing."""
    root = Path(__file__).parent
    native = (root / "gpu" / "native").glob("*.[ch]*")
    files = [*(root / "gpu").rglob("*.py"), *native, *(root / "sampling").glob("*.py")]
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _processor(device: Device) -> str:
    """Name what the kernels' choice hangs on: instruction sets on a CPU, the model of a GPU."""
    if device.kind != "cpu":
        return device.name
    interesting = {"avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.split(":", 1)[1].split())
            break
    return f"{platform.machine()} {' '.join(sorted(flags & interesting))}"


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "float32" else torch.bfloat16


def _size(n_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes} B"
