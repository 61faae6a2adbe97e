"""Compile every kernel for real GPUs without one, and tell what each takes of a multiprocessor.

`python -m zl.gpu.kernels.compile` prints the table. State: Triton's own cache on disk. Refuses model, rows and the
environment. Run without TRITON_INTERPRET: the interpreter replaces the compiler when triton is imported.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zl.errors import DeviceError
from zl.gpu.kernels import (
    checksum,
    context_loader,
    decode_attention,
    embed_rows,
    filter_update,
    linear,
    norm_residual,
    prefill_attention,
    qkv_rope_write,
    sampling_columns,
    silu_mul,
    stop_check,
)
from zl.gpu.kernels.launch import Settings, Variant
from zl.sampling import sampler
from zl.sampling.filter import KINDS, Filter
from zl.shapes import MAX_ROWS, MODEL_LEN, ModelShape, RopeScaling, pages_for

CAPABILITIES = (80, 90)
SHARED_LIMIT = 163 * 1024
"""Most shared memory of one program on sm_80: CUDA C++ Programming Guide 13, table of compute capabilities."""

BUCKETS = (16, 64, 512)
"""Token buckets that between them take every branch of the launch settings."""

LLAMA_8B = ModelShape(
    name="Llama-3.1-8B", n_layers=32, hidden=4096, n_heads=32, n_kv_heads=8, head_dim=128, ffn=14_336, vocab=128_256,
    max_position=131_072, rms_eps=1e-5, rope_theta=500_000.0, tied=False,
)  # fmt: skip
LLAMA_1B = ModelShape(
    name="Llama-3.2-1B", n_layers=16, hidden=2048, n_heads=32, n_kv_heads=8, head_dim=64, ffn=8192, vocab=128_256,
    max_position=131_072, rms_eps=1e-5, rope_theta=500_000.0,
    rope_scaling=RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_len=8192),
)  # fmt: skip
QWEN_7B = ModelShape(
    name="Qwen2.5-7B", n_layers=28, hidden=3584, n_heads=28, n_kv_heads=4, head_dim=128, ffn=18_944, vocab=152_064,
    max_position=32_768, rms_eps=1e-6, rope_theta=1_000_000.0, tied=False, attention_bias=True,
)  # fmt: skip
SMOLLM2_135M = ModelShape(
    name="SmolLM2-135M", n_layers=30, hidden=576, n_heads=9, n_kv_heads=3, head_dim=64, ffn=1536, vocab=49_152,
    max_position=8192, rms_eps=1e-5, rope_theta=100_000.0,
)  # fmt: skip
MODELS = (LLAMA_8B, LLAMA_1B, QWEN_7B, SMOLLM2_135M)
"""What CI compiles: groups of 3, 4 and 7 query heads, head sizes 64 and 128, with and without biases."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel takes, and what decides the order of its sums.

    registers, frame_bytes  of a thread; the frame is local memory, where spills live
    shared_bytes  of a program
    mma           tensor-core layouts of its intermediate form: instruction, warps along rows and columns
    reductions    the operands of its float32 sums and maxima: tensor shape, layout written out, axis
    fmad          whether a multiply and an add were contracted anywhere
    """

    model: str
    name: str
    capability: int
    warps: int
    registers: int
    frame_bytes: int
    shared_bytes: int
    mma: tuple[str, ...]
    reductions: tuple[str, ...]
    fmad: bool
    cubin_bytes: int


def variants(
    shape: ModelShape, capability: int, *, max_rows: int = MAX_ROWS, max_len: int = MODEL_LEN
) -> list[Variant]:
    """List every kernel that a model of this shape needs, with its production constants."""
    pages = pages_for(max_len)
    heads = (shape.n_heads, shape.n_kv_heads, shape.head_dim)
    qkv = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
    listed = []
    for form in (Filter(kind, shape.vocab) for kind in KINDS):
        listed += context_loader.variants(max_rows, pages, max_len, form)
        listed += sampling_columns.variants(form)
        listed += filter_update.variants(max_rows, form)
    for bucket in BUCKETS:
        listed += linear.variants(bucket, qkv, shape.hidden, capability=capability)
        listed += linear.variants(bucket, shape.hidden, qkv_rows(shape), capability=capability, add=True)
        listed += linear.variants(bucket, 2 * shape.ffn, shape.hidden, capability=capability)
        listed += linear.variants(bucket, shape.hidden, shape.ffn, capability=capability, add=True)
        listed += linear.variants(bucket, shape.vocab, shape.hidden, capability=capability)
    listed += embed_rows.variants(shape.hidden)
    listed += norm_residual.variants(shape.hidden, shape.rms_eps)
    listed += qkv_rope_write.variants(*heads, has_bias=shape.attention_bias)
    listed += decode_attention.variants(max_len, pages, *heads)
    listed += prefill_attention.variants(max_rows, max_len, pages, *heads)
    listed += silu_mul.variants(shape.ffn)
    listed += stop_check.variants(max_rows, max(1, len(shape.eos_ids)))
    listed += checksum.variants()
    # Buckets whose tiles are the same share one kernel.
    return list({variant.name: variant for variant in listed}.values())


def qkv_rows(shape: ModelShape) -> int:
    """Return the inputs of the output projection: all query heads side by side."""
    return shape.n_heads * shape.head_dim


def compile_variant(variant: Variant, capability: int, model: str = "") -> Compiled:
    """Compile one kernel for one architecture and read what it takes from the binary; DeviceError where that fails."""
    kernel, settings = variant.kernel, variant.settings
    if not hasattr(kernel, "cache_key"):
        raise DeviceError("this process interprets kernels: compile in one without TRITON_INTERPRET", call="compile")
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in variant.signature:
            signature[name] = variant.signature[name]
            if signature[name].startswith("*"):
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[name] = settings.constexprs.get(name)
    missing = set(settings.constexprs) - set(kernel.arg_names)
    if missing:
        raise DeviceError(f"{variant.name} has no parameters {sorted(missing)}", call="compile")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": settings.num_warps,
        "num_stages": settings.num_stages,
        "enable_fp_fusion": settings.fp_fusion,
    }
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, frame = read_cubin(built.asm["cubin"])
    return Compiled(
        model,
        variant.name,
        capability,
        settings.num_warps,
        registers,
        frame,
        int(built.metadata.shared),
        tuple(sorted(set(mma_layouts(built.asm["ttgir"])))),
        tuple(sorted(set(reductions(built.asm["ttgir"])))),
        "fma.rn.f32" in built.asm["ptx"],
        len(built.asm["cubin"]),
    )


def mma_layouts(ttgir: str) -> Iterator[str]:
    """Yield the tensor-core layouts that a kernel's intermediate form names, e.g. "v2 warps 2x1"."""
    pattern = r"#ttg\.nvidia_mma<\{versionMajor = (\d).*?warpsPerCTA = \[(\d+), (\d+)\]"
    for version, rows, columns in re.findall(pattern, ttgir):
        yield f"v{version} warps {rows}x{columns}"


def reductions(ttgir: str) -> Iterator[str]:
    """Yield shape, layout and axis of each reduction over a two-dimensional float32 tensor."""
    layouts = dict(re.findall(r"^(#\w+) = (#.*)$", ttgir, re.MULTILINE))
    operand = re.compile(r"\}\) : \(tensor<(\d+(?:x\d+)*)xf32, (#\w+)>")
    for body in ttgir.split('"tt.reduce"')[1:]:
        # The operand's type follows the combining region, the first `})` of the text after the operation's name.
        at = operand.match(body, body.index("})"))
        axis = re.search(r"axis = (\d+)", body)
        if at and axis and "x" in at[1]:
            yield f"{at[1]} axis {axis[1]} {layouts[at[2]]}"


EIATTR_FRAME_SIZE = 0x11
EIATTR_REGCOUNT = 0x2F
_FORMAT_SIZED = 0x04


def read_cubin(cubin: bytes) -> tuple[int, int]:
    """Read (registers a thread, local-memory bytes a thread) from a cubin, an ELF file with one kernel.

    Both are attributes of its `.nv.info` section: records of format, code, size and, for these two, (symbol, value).
    Codes as `cuobjdump -elf` of CUDA 12 and 13 names them.
    """
    if cubin[:4] != b"\x7fELF":
        raise DeviceError("the compiler returned no ELF file", call="ptxas")
    table, entry, count, names_at = (
        struct.unpack_from("<Q", cubin, 0x28)[0],
        *struct.unpack_from("<HHH", cubin, 0x3A),
    )
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(count)]
    names = sections[names_at][4]
    found: dict[int, int] = {}
    for name, _, _, _, offset, size in sections:
        end = cubin.index(b"\0", names + name)
        if cubin[names + name : end] != b".nv.info":
            continue
        at = offset
        while at < offset + size:
            form, code, n_bytes = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form != _FORMAT_SIZED:
                continue
            if code in (EIATTR_FRAME_SIZE, EIATTR_REGCOUNT):
                found[code] = max(found.get(code, 0), struct.unpack_from("<II", cubin, at)[1])
            at += n_bytes
    if EIATTR_REGCOUNT not in found:
        raise DeviceError("the compiled kernel does not tell its registers: an unknown cubin format", call="ptxas")
    return found[EIATTR_REGCOUNT], found.get(EIATTR_FRAME_SIZE, 0)


def compile_all(
    shapes: Sequence[ModelShape] = MODELS, capabilities: Sequence[int] = CAPABILITIES
) -> list[Compiled]:
    """Compile every kernel of every shape for every architecture, the sampler's where they are there."""
    done = []
    for shape in shapes:
        for capability in capabilities:
            done += [compile_variant(v, capability, shape.name) for v in variants(shape, capability)]
            done += [compile_variant(v, capability, shape.name) for v in sampler_variants(shape)]
    return done


def sampler_variants(shape: ModelShape) -> list[Variant]:
    """List the sampler's kernel, whose launcher is `zl.sampling.sampler.sample_triton`."""
    types = dict.fromkeys(("logits", "temperature", "top_p", "penalty", "weights", "logprob"), "*fp32")
    types |= dict.fromkeys(("seed", "index", "token"), "*i64") | {"seen": "*i32", "finite": "*i1"}
    kernel: Any = getattr(sampler, "_sample_kernel", None)
    if kernel is None:
        return []
    settings = Settings({"VOCAB": shape.vocab, "BLOCK": sampler.BLOCK}, num_warps=sampler.NUM_WARPS)
    return [Variant(f"sampler V={shape.vocab}", kernel, types, settings)]


def report(compiled: Sequence[Compiled]) -> str:
    """Lay the results out as a table."""
    lines = [f"{'model':14} {'kernel':30} {'sm':>3} {'warps':>5} {'regs':>5} {'spills':>7} {'shared':>8}  tensor cores"]
    for c in compiled:
        lines.append(
            f"{c.model:14} {c.name:30} {c.capability:3} {c.warps:5} {c.registers:5} {c.frame_bytes:6}B "
            f"{c.shared_bytes:7}B  {', '.join(c.mma) or '-'}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table, or with --json one record a kernel."""
    compiled = compile_all()
    if "--json" in arguments:
        print(json.dumps([dataclasses.asdict(c) for c in compiled]))
    else:
        print(report(compiled))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
