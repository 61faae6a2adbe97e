"""zl/gpu/programs.py: which program a device and a dtype get, and what that loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.gpu.test_cuda_step import SHAPE, SHAPES, make_tensors
from zl.builder import level_for
from zl.config import Settings, load
from zl.errors import ConfigError, DeviceError
from zl.gpu.cuda_guard import CudaGuard
from zl.gpu.cuda_step import CudaStep
from zl.gpu.native.build import available_levels
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.programs import open_engine, program_of
from zl.gpu.torch_step import TorchStep
from zl.server import open_build

ROOT = Path(__file__).parent.parent.parent


class Source:
    """A model in memory; counts in which dtype each tensor was asked for."""

    def __init__(self):
        self.shape = SHAPE
        self.tensors = make_tensors()
        self.names = frozenset(self.tensors)
        self.asked: dict[str, torch.dtype] = {}

    def tensor(self, name, dtype):
        self.asked[name] = dtype
        return self.tensors[name].to(dtype)

    def blocks(self, name):
        return None


class NoGpu:
    """Says that it is a GPU; torch places everything on the CPU, so the program is the dry one."""

    kind = "cuda"
    name = "no GPU"
    torch_device = "cpu"
    run_ahead = 1


def opened(dtype, **more):
    lines, source = [], Source()
    columns, slots = RowColumns(SHAPES), [StepSlot(SHAPES) for _ in range(2)]
    engine = open_engine(NoGpu(), source.shape, source, dtype, SHAPES, columns, slots, say=lines.append, **more)
    return engine, source, lines, columns


def test_bfloat16_on_cuda_takes_the_captured_program_and_uploads_with_progress():
    shares = []
    engine, source, lines, _ = opened("bfloat16", progress=shares.append)
    assert isinstance(engine, CudaStep)
    assert lines[-1] == f"program: {engine.name}"
    assert lines[-2].startswith("weights: 100% uploaded")
    assert shares[-1] == 1.0
    assert source.asked["layers.0.attn_norm"] == source.asked["layers.1.bq"] == torch.float32
    assert source.asked["layers.0.wq"] == source.asked["embed"] == torch.bfloat16
    engine.close()


class Cpu:
    """The CPU, as far as the choice of a program goes."""

    kind = "cpu"
    name = "cpu"
    torch_device = "cpu"
    run_ahead = 0


def test_a_cpu_without_compiler_is_warned_of_and_an_explicit_level_is_refused(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")

    def open_it(level):
        lines, source = [], Source()
        columns, slots = RowColumns(SHAPES), [StepSlot(SHAPES) for _ in range(2)]
        engine = open_engine(Cpu(), source.shape, source, "float32", SHAPES, columns, slots, level=level,
                             say=lines.append)  # fmt: skip
        assert isinstance(engine, TorchStep)
        return lines

    with caplog.at_level("INFO", "zl"):
        assert open_it("auto") == []
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "program: torch, eager" in record.message
    assert any(word in record.message for word in ("install g++", "no AVX2"))
    assert open_it("torch")[0].endswith("as asked")
    assert len(caplog.records) == 1
    for level in available_levels():
        with pytest.raises(DeviceError, match=r"no C\+\+ compiler found; install g\+\+") as refused:
            program_of("cpu", level)
        assert refused.value.exit_status == 2
    assert program_of("cuda", "amx") == "torch"
    if available_levels():
        with pytest.raises(ConfigError, match=r"no program to build: no C\+\+ compiler found; install g\+\+"):
            level_for(Settings(), "cpu")


def test_float32_on_cuda_takes_the_twin_and_says_so(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        engine, _, lines, _ = opened("float32")
        assert torch.get_float32_matmul_precision() == "highest"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert isinstance(engine, TorchStep)
    assert "float32 takes the slow twin" in lines[0]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the sampler, past the vocabulary: NumPy tells
def test_a_server_on_cuda_guards_the_program_and_keeps_its_slot_from_the_loop():
    device = NoGpu()
    device.allocate = np.zeros
    device.register = lambda address, n_bytes: None
    settings = load({"heartbeat_s": 30, "debug_addresses": "on"}, environ={})
    build = SimpleNamespace(
        device=device, settings=settings, dtype="bfloat16", shapes=SHAPES, model=SHAPE, weights=Source()
    )  # fmt: skip
    engine, columns, slots, run_ahead, _ = open_build(build, lambda _: None)
    assert isinstance(engine, CudaGuard)
    assert (len(slots), run_ahead) == (2, 1)
    assert columns.own_ids.shape[0] == SHAPES.max_rows + 1
    assert len(engine._slots) == 3
    assert engine._own == 2
    assert engine.heartbeat._period_s == 30
    engine.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_bloom_filter_reaches_the_program_and_the_start_log(dtype, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    engine, _, lines, _ = opened(dtype, penalty_filter="bloom")
    assert engine._filter.bloom
    assert engine.name.endswith(", Bloom penalty filter")
    assert engine.name in lines[-1]


def test_debug_addresses_reaches_the_program():
    engine, _, _, columns = opened("bfloat16", debug_addresses=True)
    columns.seed = columns.seed.copy()
    with pytest.raises(Exception, match=r"columns\.seed"):
        engine.launch(0)


def test_without_triton_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [n for n in sys.modules if n.startswith(("zl.gpu.kernels.", "zl.gpu.cuda_step"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(DeviceError, match=r"triton.*in a clone of zl, pip install '\.\[cuda\]'"):
        opened("bfloat16")


def test_the_cpu_path_loads_no_triton():
    code = "import sys, zl.gpu.programs, zl.build; print([n for n in sys.modules if n.split('.')[0] == 'triton'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
