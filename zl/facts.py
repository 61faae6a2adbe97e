"""Facts: what decides an output, and its hash, the build id.

Two processes with the same build id answer the same request bytes and seed with the same tokens. So what is hashed is
weights, tokenizer, template, the sizes that cut prompts and answers, profiles, sources, versions, and what computes.
What may differ without a trace in any output (rows, pages, threads, step sizes, cached prompts) is left out.

State: none. Refuses torch, net, dispatch and asyncio: a start from an artifact compares facts without loading torch.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import zl
from zl.compiled import compiler_version
from zl.config import POLICY, Settings
from zl.filehash import sha256_of, stamped_sha256
from zl.gpu.native.build import cpu_flags, needed_flags
from zl.sampling import profiles
from zl.shapes import ModelShape, Shapes

Facts = dict[str, Any]
"""Plain JSON values by name."""

ITEM_BYTES = {"bfloat16": 2, "float32": 4}

LIMITS = ("max_model_len", "max_tokens", "default_tokens", "system_tokens", "context_tokens")

_PACKAGES = ("torch", "numpy", "tokenizers", "gguf", "safetensors", "jinja2")
_CODE = ("gpu", "sampling", "text", "shapes.py", "flags.py", "dispatch.py", "policy.py", "facts.py")
_TORCH_FLAGS = {"avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"}


def dtype_of(settings: Settings) -> str:
    """Settle the arithmetic: "bfloat16" unless float32 is asked for."""
    return "float32" if settings.dtype == "float32" else "bfloat16"


def filter_of(settings: Settings) -> str:
    """Name the repetition penalty's filter, a kind of zl.sampling.filter."""
    return "exact" if settings.penalty_filter == "auto" else settings.penalty_filter


def kv_of(settings: Settings) -> str:
    """Settle what keys and values are kept in: "int8" where that is asked for, else the dtype."""
    return settings.kv if settings.kv != "auto" else dtype_of(settings)


def shapes_of(settings: Settings, model: ModelShape) -> Shapes:
    """Settle the sizes; the number of pages is still open."""
    max_model_len = min(settings.max_model_len, model.max_position)
    return Shapes(
        max_rows=settings.max_rows,
        max_model_len=max_model_len,
        max_tokens=min(settings.max_tokens, max_model_len - 1),
        default_tokens=min(settings.default_tokens, max_model_len - 1),
        system_tokens=settings.system_tokens,
        context_tokens=settings.context_tokens,
        step_tokens=settings.step_tokens,
    )


def limits_of(settings: Settings, model: ModelShape) -> Facts:
    """Name the settings that decide where a prompt or an answer is cut."""
    shapes = shapes_of(settings, model)
    return {name: getattr(shapes, name) for name in LIMITS} | {name: getattr(settings, name) for name in POLICY}


def inputs_of(path: Path) -> list[str]:
    """Hash the model's files, whatever is in them: what an artifact was made from. Cached by size and time."""
    if not path.is_dir():
        return [stamped_sha256(path)]
    ends = (".safetensors", ".json", ".jinja", ".gguf")
    files = sorted(file for file in path.iterdir() if file.suffix in ends and file.is_file())
    return [f"{file.name} {stamped_sha256(file)}" for file in files]


def known_facts(settings: Settings, model: ModelShape, program: str, device: str) -> Facts:
    """Collect the facts that need neither tensors nor tokenizer.

    program  an instruction level of the native program, or "torch"
    device   the device's name where it is no CPU, else "cpu"
    """
    return {
        "model": {name: value for name, value in asdict(model).items() if name != "name"},
        "dtype": dtype_of(settings),
        "kv": kv_of(settings),
        "penalty_filter": filter_of(settings),
        "device": device,
        "program": program,
        "machine": f"{platform.machine()} {' '.join(sorted(_flags(program)))}" if device == "cpu" else device,
        "limits": limits_of(settings, model),
        "profiles": profiles.HASH,
        "code": code_hash(),
        "versions": {"zl": zl.__version__} | {name: _version(name) for name in _PACKAGES},
    }


def whole_facts(known: Facts, weights: str, text: str) -> Facts:
    """Add what is read from the model: the hashes of its weights and of its tokenizer and template."""
    made_by = compiler_version() if known["program"] != "torch" else ""
    return plain({**known, "weights": weights, "text": text, "compiler": made_by})


def build_id(facts: Mapping[str, Any]) -> str:
    """Hash the facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def plain(value: Any) -> Any:
    """Return a value as it comes back from JSON, so that facts compare equal on both sides of a file."""
    return json.loads(json.dumps(value))


@cache
def code_hash() -> str:
    """Hash the sources that decide tokens: all but the wire, the command line and this house's plumbing."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for name in _CODE:
        place = root / name
        files = place.rglob("*") if place.is_dir() else (place,)
        for file in sorted(file for file in files if file.suffix in (".py", ".cpp", ".hpp", ".h")):
            digest.update(f"{file.relative_to(root)} {sha256_of(file)}\n".encode())
    return digest.hexdigest()


def _flags(program: str) -> frozenset[str]:
    """Name the instruction sets that the arithmetic hangs on: those a level is compiled for; torch looks for itself."""
    return cpu_flags() & _TORCH_FLAGS if program == "torch" else needed_flags(program)


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
