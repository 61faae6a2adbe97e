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
from zl.errors import ConfigError, ModelError
from zl.gpu.device import Device, open_device
from zl.gpu.native.build import available_levels, pick_level
from zl.gpu.native.packed import Packed
from zl.memory import MemoryPlan, native_needs, plan_memory, size_words
from zl.phases import Phases
from zl.policy import Policy
from zl.shapes import ModelShape, Shapes
from zl.text.detok import TokenTable
from zl.text.prompt import PromptBuilder
from zl.text.tokenizer import TextModel, text_model

if TYPE_CHECKING:
    from zl.gpu.weights import WeightSource

Say = Callable[[str], None]


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
        return _from_artifact(artifact, settings, "device cpu: the artifact holds its program", say, phases)
    with phases("device"):
        device, why = open_device(settings.device)
    native = device.kind == "cpu" and settings.cpu_level != "torch" and bool(available_levels())
    if settings.artifact == "off" or not native or not path.exists():
        return _from_model(settings, path, device, why, say, phases)
    try:
        return _from_cache(settings, path, why, say, phases)
    except _NoArtifactError as reason:
        say(f"no artifact: {reason}")
        return _from_model(settings, path, device, why, say, phases)


def inspect(settings: Settings, path: Path) -> ModelShape:
    """Open a model's headers and tokenizer and give its shape: what this refuses, `prepare` refuses in the same words.

    path    a model, or an artifact of `zl build`
    Raises  ModelError, ConfigError
    """
    if artifacts.is_artifact(path):
        artifact = artifacts.read(path)
        settings = artifacts.fit(artifact, settings)
        artifact.check_sizes()
        model, (text, _) = artifact.model, artifact.read_text()
    else:
        from zl.gpu.weights import open_model

        source = open_model(path)
        model, text = source.shape, text_model(source)
    _check_vocabulary(model, text)
    _layouts(settings, text, facts.shapes_of(settings, model))
    return model


class _NoArtifactError(Exception):
    """The model must be served without an artifact, and why."""


def _from_cache(settings: Settings, path: Path, why: str, say: Say, phases: Phases) -> Build:
    """Serve from the cached artifact of this build; make it first where there is none, or a damaged one."""
    with phases("artifact"):
        found = artifacts.find(path, settings, pick_level(settings.cpu_level))
    if found is not None:
        try:
            found.check_sizes()
            build = _from_artifact(found, settings, why, say, phases)
        except ModelError as damage:
            say(f"{damage}")
        else:
            say(f"artifact {found.folder} of the cache, build {found.build_id[:16]}")
            return build
    return _from_artifact(_make(settings, path, say, phases), settings, why, say, phases)


def _make(settings: Settings, path: Path, say: Say, phases: Phases) -> Artifact:
    from zl.builder import KEEP, Builder, level_for, prune

    try:
        level = level_for(settings, "cpu")
    except ConfigError as reason:
        raise _NoArtifactError(str(reason)) from reason
    say("first start of this build: making an artifact, so that the next start is quick (--artifact off: never)")
    own = Phases(phases.on_begin)  # each is told of; those of the start get them as one
    builder = Builder(path, dataclasses.replace(settings, system_prompts=()), level, own)
    try:
        made = builder.build()
    except (ModelError, ConfigError) as failure:  # ConfigError: the cache is not this user's to write
        raise _NoArtifactError(str(failure)) from failure
    total = sum(own.seconds.values())
    size = size_words(sum(entry.bytes for entry in made.files.values()))
    phases.add("make the artifact", total)
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in own.seconds.items())
    say(f"artifact {made.folder}: {size}, made in {total:.1f} s ({parts})")
    for folder in prune(made.folder):
        say(f"artifact {folder}: deleted, since the cache keeps the {KEEP} used last")
    return made


def _from_artifact(artifact: Artifact, settings: Settings, why: str, say: Say, phases: Phases) -> Build:
    check = HashCheck(artifact)
    try:
        with phases("device"):
            device, _ = open_device("cpu")
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
    _check_vocabulary(model, text)
    dtype = facts.dtype_of(settings)
    shapes = facts.shapes_of(settings, model)
    if settings.max_model_len > shapes.max_model_len:
        say(f"max_model_len {settings.max_model_len}: cut to {shapes.max_model_len}, all that {model.name} takes")
    count = native_needs(settings, model, device, dtype, weights)
    if count is None and settings.kv == "int8":
        raise ConfigError(
            f"kv = 'int8': only the native CPU program keeps keys and values in eight bits, and this build computes on "
            f"{device.name} without it; leave kv out" + (", or serve with --device cpu" if device.kind != "cpu" else "")
        )
    n_pages, memory = plan_memory(settings, model, shapes, device, dtype, count)
    shapes = dataclasses.replace(shapes, n_pages=n_pages)
    say(memory.line(n_pages))
    with phases("prompt layouts"):
        prompts, policy = _layouts(settings, text, shapes)
    return Build(settings, device, weights, model, text, tokens, prompts, policy, shapes, dtype, memory, build_id)


def _check_vocabulary(model: ModelShape, text: TextModel) -> None:
    if text.vocab_size > model.vocab:
        raise ModelError(
            f"{model.name}: the tokenizer has {text.vocab_size} ids, the embedding {model.vocab} rows; "
            "the file is not whole, fetch it again"
        )


def _layouts(settings: Settings, text: TextModel, shapes: Shapes) -> tuple[PromptBuilder, Policy]:
    policy = Policy(shapes, settings.actions, (settings.temperature_low, settings.temperature_high))
    return PromptBuilder(text, shapes, policy), policy
