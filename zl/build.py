"""The build: decide everything that can be decided before a request arrives.

State: none; `prepare` returns one frozen Build, from an artifact where there is one. Refuses net, dispatch and asyncio,
and within gpu the loop and staging. torch is loaded only where no artifact helps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zl import artifact as artifacts
from zl import facts
from zl.artifact import Artifact, HashCheck
from zl.config import Settings
from zl.errors import CapacityError, ConfigError, ModelError
from zl.gpu.device import Device, open_device
from zl.gpu.native.build import available_levels, pick_level
from zl.gpu.native.packed import Packed
from zl.phases import Phases
from zl.policy import Policy
from zl.shapes import PAGE, ModelShape, Shapes, pages_for
from zl.text.detok import TokenTable
from zl.text.prompt import PromptBuilder
from zl.text.tokenizer import TextModel, text_model

if TYPE_CHECKING:
    from zl.gpu.weights import WeightSource

CPU_KV_BYTES = 2 << 30
"""Upper bound of the KV pool on a CPU when no size is given: 91 thousand tokens of the default model."""

RESERVE_BYTES = 256 << 20
"""Memory left for the process itself when the pool's size is chosen."""

CUDA_RESERVE_BYTES = 1 << 30
"""Device memory left alone: the allocator rounds every tensor above 1 MiB up to 2 MiB, and others may hold some too."""

Say = Callable[[str], None]


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
    """All that serving needs, decided. `weights`: the opened model, or what an artifact has packed."""

    settings: Settings
    device: Device
    weights: WeightSource | Packed
    model: ModelShape
    text: TextModel
    tokens: TokenTable
    prompts: PromptBuilder
    policy: Policy
    shapes: Shapes
    dtype: str
    memory: MemoryPlan
    build_id: str


def prepare(settings: Settings, path: Path, say: Say, phases: Phases | None = None) -> Build:
    """Open the model and the device and decide the shapes.

    path    a model, or an artifact of `zl build`
    say     called with one line a decision
    Raises  ModelError, ConfigError, CapacityError, DeviceError: one line each
    """
    phases = phases if phases is not None else Phases()
    if artifacts.is_artifact(path):
        with phases("artifact"):
            artifact = artifacts.read(path)
            settings = artifacts.fit(artifact, settings)
            artifact.check_sizes()
        say(f"artifact {path}: {artifact.model.name}, build {artifact.build_id[:16]}")
        return _from_artifact(artifact, settings, say, phases)
    with phases("device"):
        device, why = open_device(settings.device)
    native = device.kind == "cpu" and settings.cpu_level != "torch" and bool(available_levels())
    if settings.artifact == "off" or not native or not path.exists():
        return _from_model(settings, path, device, why, say, phases)
    try:
        return _from_cache(settings, path, say, phases)
    except _NoArtifactError as reason:
        say(f"no artifact: {reason}")
        return _from_model(settings, path, device, why, say, phases)


class _NoArtifactError(Exception):
    """The model must be served without an artifact, and why."""


def _from_cache(settings: Settings, path: Path, say: Say, phases: Phases) -> Build:
    """Serve from the cached artifact of this build; make it first where there is none, or a damaged one."""
    with phases("artifact"):
        found = artifacts.find(path, settings, pick_level(settings.cpu_level))
    if found is not None:
        try:
            found.check_sizes()
            build = _from_artifact(found, settings, say, phases)
        except ModelError as damage:
            say(f"{damage}")
        else:
            say(f"artifact {found.folder} of the cache, build {found.build_id[:16]}")
            return build
    return _from_artifact(_make(settings, path, say), settings, say, phases)


def _make(settings: Settings, path: Path, say: Say) -> Artifact:
    from zl.builder import Builder, level_for, prune

    try:
        level = level_for(settings, "cpu")
    except ConfigError as reason:
        raise _NoArtifactError(str(reason)) from reason
    say("first start of this build: making an artifact, so that the next start is quick (--artifact off: never)")
    own = Phases()
    builder = Builder(path, dataclasses.replace(settings, system_prompts=()), level, own)
    try:
        made = builder.build()
    except ModelError as failure:
        raise _NoArtifactError(str(failure)) from failure
    total = sum(own.seconds.values())
    size = _size(sum(entry.bytes for entry in made.files.values()))
    say(f"artifact {made.folder}: {size}, made in {total:.1f} s")
    for folder in prune(made.folder):
        say(f"artifact {folder}: not used for long, deleted")
    return made


def _from_artifact(artifact: Artifact, settings: Settings, say: Say, phases: Phases) -> Build:
    check = HashCheck(artifact)
    try:
        with phases("device"):
            device, why = open_device("cpu")
        with phases("tokenizer"):
            text, tokens = artifact.read_text()
        build = _decide(settings, device, why, artifact.packed, artifact.model, text, tokens, artifact.build_id,
                        say, phases)  # fmt: skip
    finally:
        with phases("check hashes"):
            check.wait()
    from zl.builder import used

    used(artifact.folder)
    return build


def _from_model(settings: Settings, path: Path, device: Device, why: str, say: Say, phases: Phases) -> Build:
    with phases("open the model"):
        from zl.gpu.weights import open_model

        source = open_model(path)
    with phases("tokenizer"):
        text = text_model(source)
        tokens = TokenTable(text)
    with phases("hash the model"):
        from zl.gpu.programs import program_of

        program = program_of(device.kind, settings.cpu_level)
        known = facts.known_facts(settings, source.shape, program, "cpu" if device.kind == "cpu" else device.name)
        build_id = facts.build_id(facts.whole_facts(known, source.sha256, text.sha256))
    return _decide(settings, device, why, source, source.shape, text, tokens, build_id, say, phases)


def _decide(
    settings: Settings,
    device: Device,
    why: str,
    weights: WeightSource | Packed,
    model: ModelShape,
    text: TextModel,
    tokens: TokenTable,
    build_id: str,
    say: Say,
    phases: Phases,
) -> Build:
    say(why)
    if text.vocab_size > model.vocab:
        raise ModelError(
            f"{model.name}: the tokenizer has {text.vocab_size} ids, the embedding {model.vocab} rows; "
            "the file is not whole, fetch it again"
        )
    dtype = facts.dtype_of(settings)
    shapes = facts.shapes_of(settings, model)
    n_pages, memory = plan_memory(settings, model, shapes, device, dtype)
    shapes = dataclasses.replace(shapes, n_pages=n_pages)
    say(memory.line(n_pages))
    with phases("prompt layouts"):
        policy = Policy(shapes, settings.actions, (settings.temperature_low, settings.temperature_high))
        prompts = PromptBuilder(text, shapes, policy)
    return Build(settings, device, weights, model, text, tokens, prompts, policy, shapes, dtype, memory, build_id)


def page_bytes(model: ModelShape, dtype: str) -> int:
    """Bytes of one page of K and V over all layers."""
    return 2 * model.n_layers * PAGE * model.n_kv_heads * model.head_dim * facts.ITEM_BYTES[dtype]


def weight_bytes(model: ModelShape, dtype: str) -> int:
    """Bytes of the weights in `dtype`; a tied head is counted twice, since programs pack it for themselves."""
    attention = model.hidden * model.head_dim * 2 * (model.n_heads + model.n_kv_heads)
    layer = attention + 3 * model.hidden * model.ffn + 2 * model.hidden
    return (model.n_layers * layer + 2 * model.vocab * model.hidden + model.hidden) * facts.ITEM_BYTES[dtype]


def plan_memory(
    settings: Settings, model: ModelShape, shapes: Shapes, device: Device, dtype: str
) -> tuple[int, MemoryPlan]:
    """Choose the number of KV pages; CapacityError, with the numbers, where not even one full row fits."""
    if device.kind != "cpu" and dtype == "bfloat16":
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
    from zl.gpu import cuda_memory

    free, _ = device.memory()
    page = page_bytes(model, "bfloat16")
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


def _size(n_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes} B"
