"""Every kernel, compiled for real GPUs: what it takes, and what its compiled form promises about the order of sums.

The compiler runs in a process of its own, since this one interprets kernels. Triton caches what it has compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zl.gpu.kernels import compile as compile_file
from zl.gpu.kernels.compile import CAPABILITIES, MODELS, SHARED_LIMIT, Compiled

ROOT = Path(__file__).parent.parent.parent

KERNELS = (
    "checksum",
    "context_loader",
    "context_start",
    "decode_attention",
    "decode_combine",
    "embed_rows",
    "filter_update",
    "linear",
    "norm_residual",
    "prefill_attention",
    "qkv_rope_write",
    "sampler",
    "silu_mul",
    "stop_check",
    "sampling_columns",
)


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "zl.gpu.kernels.compile", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    return [
        Compiled(**(record | {name: tuple(record[name]) for name in ("mma", "reductions")}))
        for record in json.loads(run.stdout)
    ]


@pytest.mark.timeout(900)
def test_every_kernel_compiles_without_spills_within_shared_memory(compiled, tell):
    tell("\n" + compile_file.report(compiled))
    for c in compiled:
        where = f"{c.model} {c.name} sm_{c.capability}"
        assert c.frame_bytes == 0, f"{where} spills {c.frame_bytes} bytes a thread"
        assert c.shared_bytes <= SHARED_LIMIT, f"{where} takes {c.shared_bytes} bytes of shared memory"
        assert 0 < c.registers <= 255, where
    for model in (shape.name for shape in MODELS):
        for capability in CAPABILITIES:
            names = {c.name.split()[0] for c in compiled if (c.model, c.capability) == (model, capability)}
            assert names == set(KERNELS)


def test_one_weight_meets_one_tensor_core_instruction_in_every_bucket(compiled):
    for c in compiled:
        if c.name.startswith("linear"):
            (layout,) = c.mma
            assert layout.startswith("v2" if c.capability == 80 else "v3"), c


def test_decode_and_prefill_sum_in_the_same_layout_and_never_contract(compiled):
    by_model: dict[tuple[str, int], dict[str, Compiled]] = {}
    for c in compiled:
        if c.name.startswith(("decode", "prefill")):
            by_model.setdefault((c.model, c.capability), {})[c.name.split()[0]] = c
    assert len(by_model) == len(MODELS) * len(CAPABILITIES)
    for kernels in by_model.values():
        decode, prefill, combine = (kernels[n] for n in ("decode_attention", "prefill_attention", "decode_combine"))
        assert decode.mma == prefill.mma
        assert decode.mma[0].startswith("v2")
        assert decode.reductions == prefill.reductions
        assert len(decode.reductions) == 1
        assert [decode.fmad, prefill.fmad, combine.fmad] == [False] * 3


def test_a_file_that_is_no_cubin_is_refused():
    with pytest.raises(compile_file.DeviceError):
        compile_file.read_cubin(b"PTX " * 100)


def test_compiling_in_an_interpreting_process_is_refused():
    (variant, *_) = compile_file.variants(compile_file.SMOLLM2_135M, 80)
    with pytest.raises(compile_file.DeviceError, match="TRITON_INTERPRET"):
        compile_file.compile_variant(variant, 80)
