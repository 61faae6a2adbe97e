"""The memory plan: how many KV pages a build has, and where every byte goes, before any of them is taken.

State: none. Refuses triton, net, dispatch and asyncio: the plan of a GPU is made, and tested, on machines without one;
torch is loaded for that plan alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zl import facts
from zl.config import Settings
from zl.errors import CapacityError
from zl.gpu.device import Device
from zl.gpu.guarded import drawn_bytes
from zl.gpu.heartbeat import with_canary
from zl.gpu.native.build import have_compiler, pick_level
from zl.gpu.native.needs import Needs, needs, pool_bytes, threads_of
from zl.gpu.native.packed import Packed
from zl.gpu.pinned import columns_bytes, slots_bytes
from zl.shapes import PAGE, ModelShape, Shapes

if TYPE_CHECKING:
    from zl.gpu.weights import WeightSource

CPU_KV_BYTES = 2 << 30
"""Upper bound of the KV pool on a CPU when no size is given: 91 thousand tokens of the default model."""

RESERVE_BYTES = 256 << 20
"""Memory left for the process itself when the pool's size is chosen: interpreter, tokenizer, arena, a sampler a
thread."""

CUDA_RESERVE_BYTES = 1 << 30
"""Device memory left alone: the allocator rounds every tensor above 1 MiB up to 2 MiB, and others may hold some too."""

Count = Callable[[Shapes], Needs]
"""Counts what a native step over some shapes would map."""


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory goes, in bytes. The KV pool and the columns include the heartbeat's canary: a page and a row.

    weights    on the CPU with the file's blocks kept beside them, where they are
    buffers    activations and row state
    on_device  the plan is of a device's memory; `columns` alone are in the host's
    kv         what keys and values are kept in, where that is not the dtype
    """

    weights: int
    kv_pool: int
    columns: int
    free_before: int
    programs: int = 0
    buffers: int = 0
    reserve: int = 0
    on_device: bool = False
    kv: str = ""

    def line(self, n_pages: int) -> str:
        """Say it in one line."""
        kind = f" in {self.kv}" if self.kv else ""
        pool = f"KV pool {size_words(self.kv_pool)}{kind} ({n_pages} pages, {n_pages * PAGE:,} tokens)"
        if self.on_device:
            return (
                f"memory: weights {size_words(self.weights)}, {pool}, programs {size_words(self.programs)} (estimate), "
                f"buffers {size_words(self.buffers)}, reserve {size_words(self.reserve)}, of "
                f"{size_words(self.free_before)} free; columns {size_words(self.columns)} in page-locked host memory"
            )
        return (
            f"memory: weights {size_words(self.weights)}, {pool}, buffers {size_words(self.buffers)}, columns "
            f"{size_words(self.columns)}, {size_words(self.free_before)} free before"
        )


def native_needs(
    settings: Settings, model: ModelShape, device: Device, dtype: str, weights: WeightSource | Packed
) -> Count | None:
    """Give what counts the native step's memory; None where another program computes."""
    packed = isinstance(weights, Packed)
    if device.kind != "cpu" or not (packed or (settings.cpu_level != "torch" and have_compiler())):
        return None
    threads = threads_of(settings.threads)
    blocks = weights if isinstance(weights, Packed) else weights.blocks
    level = "" if packed else pick_level(settings.cpu_level)
    kv, kept = facts.kv_of(settings), facts.filter_of(settings)
    return lambda shapes: needs(model, blocks, shapes, dtype, level, threads, kv, kept)


def page_bytes(model: ModelShape, dtype: str) -> int:
    """Bytes of one page of K and V over all layers, without padding."""
    return 2 * model.n_layers * PAGE * model.n_kv_heads * model.head_dim * facts.ITEM_BYTES[dtype]


def twin_bytes(model: ModelShape, dtype: str) -> int:
    """Bytes of the torch twin's weights at their most: float32, beside what they are widened from; a tied head once."""
    attention = model.hidden * model.head_dim * 2 * (model.n_heads + model.n_kv_heads)
    layer = attention + 3 * model.hidden * model.ffn + 2 * model.hidden
    tables = model.vocab * model.hidden * (1 if model.tied else 2)
    return (model.n_layers * layer + tables + model.hidden) * (4 + (2 if dtype == "bfloat16" else 0))


def plan_memory(
    settings: Settings, model: ModelShape, shapes: Shapes, device: Device, dtype: str, count: Count | None = None
) -> tuple[int, MemoryPlan]:
    """Choose the number of KV pages; CapacityError, with the numbers, where not even one full row fits.

    A size that was asked for and that no start on this machine could grant is a lasting error; one too large for
    what is free now is none.

    count  `native_needs`; None: the captured program where there is a device and bfloat16, else the torch twin
    """
    if device.kind != "cpu" and dtype == "bfloat16":
        return _plan_cuda(settings, model, shapes, device)
    free, total = device.memory()
    if count is not None:
        wide = with_canary(replace(shapes, n_pages=0))  # the canary has a row and a page of its own
        page, base = pool_bytes(model, 1, facts.kv_of(settings)), count(wide)
        weights, buffers, own = base.weights, base.scratch + drawn_bytes(wide), base.pool
    else:
        wide, own, page = shapes, 0, page_bytes(model, dtype)
        words = -(-model.vocab // 32)
        row = 4 * model.vocab + 4 * words + 4 * shapes.max_model_len
        weights, buffers = twin_bytes(model, dtype), shapes.max_rows * row
    columns = columns_bytes(wide) + slots_bytes(wide, 2)
    left = free - weights - buffers - columns - own - RESERVE_BYTES
    least = shapes.pages_per_row * page
    all_rows = shapes.max_rows * least
    if settings.kv_memory:
        kv = settings.kv_memory
        if kv > left:
            raise CapacityError(
                f"kv_memory {size_words(kv)} does not fit: {size_words(free)} are free, weights need "
                f"{size_words(weights)}, buffers {size_words(buffers)}, columns {size_words(columns)}, reserve "
                f"{size_words(RESERVE_BYTES)}; at most {size_words(max(0, left))} are left",
                lasting=kv > left + total - free,
            )
        never = kv < least
    else:
        share = left // 2 if device.kind == "cpu" else int(left * 0.9)
        never = (left + total - free) < least
        kv = min(all_rows, share, CPU_KV_BYTES) if device.kind == "cpu" else min(all_rows, share)
    n_pages = max(0, kv) // page
    if n_pages < shapes.pages_per_row:
        raise CapacityError(
            f"a KV pool of {size_words(max(0, kv))} holds {n_pages * PAGE} tokens, one request of max_model_len "
            f"{shapes.max_model_len} needs {size_words(least)}: raise --kv-memory or lower --max-model-len",
            lasting=never,
        )
    pool = n_pages * page if count is None else count(replace(wide, n_pages=wide.n_pages + n_pages)).pool
    kv_kind = settings.kv if settings.kv != "auto" else ""
    return n_pages, MemoryPlan(weights, pool, columns, free, buffers=buffers, kv=kv_kind)


def _plan_cuda(settings: Settings, model: ModelShape, shapes: Shapes, device: Device) -> tuple[int, MemoryPlan]:
    """Plan the captured program's memory: what it allocates is known to the byte, but for the programs themselves."""
    from zl.gpu import cuda_memory

    free, total = device.memory()
    page = page_bytes(model, "bfloat16")
    wide = with_canary(shapes)
    n_slots = device.run_ahead + 2  # one is the canary's
    weights = cuda_memory.weight_bytes(model, o_bias=model.attention_bias)
    programs = cuda_memory.program_bytes(model, wide, n_slots, canary=True)
    buffers = cuda_memory.buffer_bytes(model, wide, canary=True, penalty_filter=facts.filter_of(settings))
    columns = columns_bytes(wide) + slots_bytes(wide, n_slots)
    left = free - weights - programs - buffers - page - CUDA_RESERVE_BYTES
    least = shapes.pages_per_row * page
    wanted = settings.kv_memory or min(shapes.max_rows * least, left)
    if wanted > left or left < least:
        raise CapacityError(
            f"{model.name} does not fit {device.name}: {size_words(free)} free, weights {size_words(weights)}, "
            f"programs {size_words(programs)} (estimate), buffers {size_words(buffers)}, reserve "
            f"{size_words(CUDA_RESERVE_BYTES)} leave {size_words(max(0, left))} for the KV pool, "
            + (f"kv_memory asks for {size_words(settings.kv_memory)}" if settings.kv_memory else "")
            + ("; " if settings.kv_memory and left < least else "")
            + (f"one request of max_model_len {shapes.max_model_len} needs {size_words(least)}" if left < least else "")
            + ": lower --max-model-len, --step-tokens, --max-rows or --kv-memory, or take a smaller model",
            lasting=max(wanted if settings.kv_memory else 0, least) > left + total - free,
        )
    n_pages = wanted // page
    if n_pages < shapes.pages_per_row:
        raise CapacityError(
            f"kv_memory {size_words(wanted)} holds {n_pages * PAGE} tokens, one request of max_model_len "
            f"{shapes.max_model_len} needs {size_words(least)}: raise --kv-memory or lower --max-model-len",
            lasting=bool(settings.kv_memory),
        )
    return n_pages, MemoryPlan(
        weights, (n_pages + 1) * page, columns, free, programs, buffers, CUDA_RESERVE_BYTES, on_device=True
    )


def size_words(n_bytes: int) -> str:
    """Write bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes} B"
