"""zl/build.py: the memory plan of a GPU that is not there."""

from __future__ import annotations

import re

import pytest

from zl.build import CUDA_RESERVE_BYTES, plan_memory
from zl.config import load
from zl.errors import CapacityError
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
    assert memory.kv_pool == n_pages * 4 * 2**20  # 128 KiB a token
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
