"""zl/memory.py: the plan of a GPU that is not there, and that of the CPU against what is really taken."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.native_kit import tiny
from tests.gpu.test_native_blocks import quantised
from zl.config import load
from zl.errors import CapacityError, DeviceError
from zl.gpu.cpu import CpuDevice
from zl.gpu.cuda_memory import check_device
from zl.gpu.guard import Guard
from zl.gpu.guarded import drawn_bytes
from zl.gpu.heartbeat import with_canary
from zl.gpu.native.build import have_compiler
from zl.gpu.native.needs import Needs
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.renewal import FromSource
from zl.memory import CUDA_RESERVE_BYTES, native_needs, plan_memory
from zl.shapes import PAGE, ModelShape, Shapes

GIB = 2**30
LLAMA_8B = ModelShape(
    name="Llama-3.1-8B", n_layers=32, hidden=4096, n_heads=32, n_kv_heads=8, head_dim=128, ffn=14_336, vocab=128_256,
    max_position=131_072, rms_eps=1e-5, rope_theta=500_000.0, tied=False,
)  # fmt: skip
LLAMA_70B = ModelShape(
    name="Llama-3.1-70B", n_layers=80, hidden=8192, n_heads=64, n_kv_heads=8, head_dim=128, ffn=28_672, vocab=128_256,
    max_position=131_072, rms_eps=1e-5, rope_theta=500_000.0, tied=False,
)  # fmt: skip


class Gpu:
    """A GPU's memory and nothing else; free as the driver shows it beside a CUDA context."""

    kind = "cuda"
    name = "a GPU of 80 GB"
    torch_device = "cuda:0"
    run_ahead = 1

    def __init__(self, total=80_000_000_000, context=600 << 20):
        self.total, self.free = total, total - context

    def memory(self):
        return self.free, self.total


def plan(model=LLAMA_8B, device=None, max_len=4096, **flags):
    settings = load(flags, environ={})
    return plan_memory(settings, model, Shapes(max_model_len=max_len), device or Gpu(), "bfloat16")


def test_8b_with_256_rows_fits_80_gb():
    n_pages, memory = plan()
    parts = (memory.weights, memory.kv_pool, memory.programs, memory.buffers, memory.reserve)
    assert all(part > 0 for part in parts)
    assert sum(parts) <= memory.free_before < 80_000_000_000
    assert 16.0e9 < memory.weights < 16.1e9  # 8.03 billion parameters of two bytes
    assert memory.kv_pool == (n_pages + 1) * 4 * 2**20  # 128 KiB a token
    assert n_pages * PAGE / 256 > 1_700  # tokens a row when all are seated
    line = memory.line(n_pages)
    for word in ("weights 14.96 GiB", "KV pool", "programs", "buffers", "reserve 1.00 GiB", "free"):
        assert word in line, line


def test_a_small_model_takes_no_more_pages_than_its_rows_can_use():
    small = ModelShape(
        name="SmolLM2-135M", n_layers=30, hidden=576, n_heads=9, n_kv_heads=3, head_dim=64, ffn=1536, vocab=49_152,
        max_position=8192, rms_eps=1e-5, rope_theta=100_000.0,
    )  # fmt: skip
    n_pages, _ = plan(small, max_len=1024)
    assert n_pages == 256 * 1024 // PAGE


def test_what_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(CapacityError) as refused:
        plan(LLAMA_70B)
    text = str(refused.value)
    for number in (r"73\.92 GiB free", r"weights 131\.\d\d GiB", "reserve 1.00 GiB", "leave 0 B", "needs 1.25 GiB"):
        assert re.search(number, text), (number, text)
    with pytest.raises(CapacityError, match=r"kv_memory asks for 60\.00 GiB"):
        plan(kv_memory="60GiB")
    with pytest.raises(CapacityError, match=r"holds 2048 tokens, one request of max_model_len 4096"):
        plan(kv_memory="256MiB")


class Cpu(CpuDevice):
    """A machine of 16 GiB, of which others take some."""

    free = 15 * GIB

    def memory(self):
        return self.free, 16 * GIB


@pytest.mark.parametrize("make", [Cpu, lambda: Gpu(30 * GIB)])
def test_only_what_others_may_give_back_is_worth_another_start(make):
    """Exit status 2 is not restarted."""
    small = replace(LLAMA_8B, n_layers=8, vocab=32_000)

    def refused(free=None, **flags):
        device = make()
        device.free = free if free is not None else device.free
        with pytest.raises(CapacityError) as caught:
            plan(small, device, **flags)
        return caught.value.exit_status

    plan(small, make())
    assert refused(kv_memory="800GiB") == 2
    assert refused(kv_memory="1MiB") == 2
    assert refused(free=2 * GIB) == 1
    assert refused(free=4 * GIB, kv_memory="4GiB") == 1


@pytest.mark.parametrize("n_bytes", [17 * GIB, 20 * GIB, 40 * GIB, 141_000_000_000])
def test_the_plan_never_exceeds_what_is_free(n_bytes):
    device = Gpu(n_bytes)
    try:
        n_pages, memory = plan(device=device)
    except CapacityError:
        assert n_bytes < 18 * GIB
        return
    assert memory.weights + memory.kv_pool + memory.programs + memory.buffers + CUDA_RESERVE_BYTES <= device.free
    assert n_pages * PAGE >= 4096


# -- the CPU's plan, against what a guarded native step really takes -------------------------------------------------


class Source:
    """A model's tensors and blocks in memory."""

    def __init__(self, shape, weights, blocks):
        self.shape, self.weights, self.found = shape, weights, blocks

    def blocks(self, name):
        return self.found.get(name)


def resident() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", text)[1])


@pytest.mark.skipif(not have_compiler(), reason="no C++ compiler or no AVX2: nothing native to plan for")
@pytest.mark.parametrize(
    ("quantisation", "kv", "kind"),
    [("", "auto", "exact"), ("Q4_1", "auto", "exact"), ("Q8_0", "auto", "bloom"), ("", "int8", "exact")],
)
def test_the_cpu_plan_is_what_a_guarded_step_takes(quantisation, kv, kind):
    shape = tiny(hidden=768, n_heads=12, n_kv_heads=4, ffn=2048, vocab=8_192)
    names = ("embed", "wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down") if quantisation else ()
    weights, blocks = quantised(shape, dict.fromkeys(names, quantisation))
    source = Source(shape, weights, blocks)
    settings = load({"kv_memory": "48MiB", "threads": 1, "kv": kv, "penalty_filter": kind}, environ={})
    shapes = Shapes(max_rows=32, max_model_len=512, max_tokens=64, step_tokens=128)
    device = CpuDevice()
    count = native_needs(settings, shape, device, "bfloat16", source)
    n_pages, memory = plan_memory(settings, shape, shapes, device, "bfloat16", count)
    wide = with_canary(replace(shapes, n_pages=n_pages))

    columns, slots = RowColumns(wide, device.allocate), [StepSlot(wide, device.allocate) for _ in range(2)]
    arrays = [*vars(columns).values(), *(array for slot in slots for array in vars(slot).values())]
    assert memory.columns == sum(array.nbytes for array in arrays)
    before = resident()
    native = NativeStep(
        shape, weights, columns, slots, wide.n_pages, wide.step_tokens, 1, "auto", source.blocks, kv, kind
    )
    taken = resident() - before
    planned = memory.weights + memory.kv_pool + memory.buffers - drawn_bytes(wide)
    assert planned - (6 << 20) <= taken <= planned + (8 << 20), (planned, taken)
    assert native.packed().nbytes <= memory.weights
    plain = 2 * sum(t.numel() for name, t in weights.items() if name != "embed") + 4 * shape.vocab * shape.hidden
    # A block of 32 values takes 20 and 34 bytes, beside the 64 of its plain form; the head is the embedding again.
    share = {"": 0.0, "Q4_1": 20 / 64, "Q8_0": 34 / 64}[quantisation]
    assert memory.weights >= plain * (1 + 0.9 * share) - 2 * shape.vocab * shape.hidden * share
    pages = native.pool()[0]
    assert pages.shape[1] == n_pages + 1, "the canary has a page beyond the books'"
    assert pages.nbytes <= memory.kv_pool < pages.nbytes + (5 << 20)
    tokens_per_mib = n_pages * PAGE / 48
    assert tokens_per_mib == pytest.approx(2**20 / (shape.n_layers * 4 * 2 * (66 if kv == "int8" else 128)), rel=0.01)
    assert (" in int8 (" in memory.line(n_pages)) == (kv == "int8")
    guard = Guard(native, columns, slots, wide, FromSource(source), beat_s=0)
    assert guard._mender._drawn.nbytes == drawn_bytes(wide)
    guard.close()


def test_a_pool_that_leaves_no_place_for_weights_and_canary_is_refused():
    class Small(CpuDevice):
        def memory(self):
            return 600 << 20, 600 << 20

    settings = load({"kv_memory": "100MiB", "threads": 1}, environ={})
    shape, shapes = tiny(), Shapes(max_rows=4, max_model_len=256, step_tokens=32)
    counted = []

    def count(sizes):
        counted.append(sizes)
        return Needs(200 << 20, 50 << 20, 20 << 20)

    with pytest.raises(CapacityError, match=r"weights need 200\.00 MiB, buffers 20\.00 MiB"):
        plan_memory(settings, shape, shapes, Small(), "bfloat16", count)
    assert (counted[0].max_rows, counted[0].n_pages) == (5, 1)


def test_the_gpu_plan_counts_the_canary():
    n_pages, memory = plan()
    assert memory.kv_pool == (n_pages + 1) * 4 * 2**20
    wide, slots = with_canary(Shapes(n_pages=n_pages)), 3
    sizes = [array.nbytes for array in vars(RowColumns(wide)).values()]
    sizes += [slots * array.nbytes for array in vars(StepSlot(wide)).values()]
    assert memory.columns == sum(sizes)


@pytest.mark.parametrize(
    ("name", "version", "shared", "word"),
    [("Tesla V100", (7, 0), 96, "bfloat16 needs 8.0"), ("NVIDIA L4", (8, 9), 99, "99 KiB of shared memory"),
     ("NVIDIA A10", (8, 6), 99, "163 KiB")],
)  # fmt: skip
def test_a_device_that_the_kernels_do_not_run_on_is_refused_by_name(name, version, shared, word):
    with pytest.raises(DeviceError) as refused:
        check_device(name, *version, shared << 10)
    assert name in str(refused.value)
    assert word in str(refused.value)
    assert "--device cpu" in str(refused.value)


def test_the_target_devices_are_taken():
    assert check_device("NVIDIA A100", 8, 0, 163 << 10) == 80
    assert check_device("NVIDIA H100", 9, 0, 227 << 10) == 90
