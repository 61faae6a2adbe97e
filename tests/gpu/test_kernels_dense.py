"""Linear, norm, SwiGLU and the QKV write against their references, with poison in padding and free slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.kernel_kit import DEVICE, NAN, exact_dots, ints, normal
from zl.errors import ShapeError
from zl.gpu.kernels import linear as linear_file
from zl.gpu.kernels.linear import linear, linear_reference
from zl.gpu.kernels.norm_residual import norm_residual, norm_residual_reference
from zl.gpu.kernels.qkv_rope_write import qkv_rope_write, qkv_rope_write_reference
from zl.gpu.kernels.silu_mul import silu_mul, silu_mul_reference
from zl.shapes import PAGE

BF16 = torch.bfloat16


def poisoned(live: int, x: torch.Tensor) -> torch.Tensor:
    x[live:] = NAN
    return x


# --- linear


@settings(max_examples=20, deadline=None)
@given(
    m=st.sampled_from([1, 5, 16, 33, 64, 130]),
    n=st.sampled_from([8, 32, 33, 96]),
    k=st.sampled_from([16, 48, 96, 128]),
    live=st.integers(0, 130),
    bias=st.booleans(),
    add=st.booleans(),
    capability=st.sampled_from([80, 90]),
    wide=st.booleans(),
)
def test_linear_equals_reference(m, n, k, live, bias, add, capability, wide):
    g = torch.Generator().manual_seed(m * n + k)
    live = min(live, m)
    x, weight = poisoned(live, normal(g, m, k, dtype=BF16)), normal(g, n, k, dtype=BF16)
    out = normal(g, m, n, dtype=torch.float32 if wide or add else BF16)
    b = normal(g, n) if bias else None
    expected = out.clone()
    linear(x, weight, out, ints([live]), bias=b, add=add, capability=capability)
    linear_reference(x, weight, expected, ints([live]), bias=b, add=add, capability=capability)
    loose = 1e-2 if out.dtype == BF16 else 2e-5
    torch.testing.assert_close(out, expected, rtol=loose, atol=loose * 10)
    assert torch.equal(out[live:], expected[live:])


@pytest.mark.parametrize("capability", [80, 90])
def test_a_rows_bits_are_the_same_in_every_bucket(capability):
    g = torch.Generator().manual_seed(1)
    x, weight = normal(g, 256, 192, dtype=BF16), normal(g, 40, 192, dtype=BF16)
    results, tiles = [], set()
    with exact_dots():
        for m in (1, 16, 32, 64, 256):
            out = torch.empty(m, 40, device=DEVICE)
            linear(x[:m].contiguous(), weight, out, ints([m]), capability=capability)
            results.append(out)
            tiles.add(linear_file.settings(m, 40, 192, capability=capability).constexprs["BLOCK_M"])
    assert tiles == ({16, 32, 64, 128} if capability == 80 else {64, 128})
    for out in results:
        assert torch.equal(out, results[-1][: len(out)])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("n", [2048, 4096, 16_384])
def test_every_tile_choice_keeps_one_k_block(capability, n):
    chosen = [linear_file.settings(m, n, 4096, capability=capability).constexprs for m in (1, 16, 32, 64, 128, 512)]
    assert {c["BLOCK_K"] for c in chosen} == {64}
    assert all(c["BLOCK_M"] >= (64 if capability == 90 else 16) for c in chosen)


@pytest.mark.parametrize(("k", "block"), [(576, 64), (96, 32), (48, 16)])
def test_k_block_divides_the_weight(k, block):
    assert linear_file.k_block(k) == block


def test_linear_refuses_wrong_arguments():
    x, weight, out = (torch.zeros(4, 32, dtype=BF16), torch.zeros(8, 32, dtype=BF16), torch.zeros(4, 8))
    one = torch.ones(1, dtype=torch.int32)

    def refused(argument: str, x=x, weight=weight, out=out, n_live=one, **more) -> None:
        with pytest.raises(ShapeError) as error:
            linear(x, weight, out, n_live, capability=80, **more)
        assert error.value.argument == argument

    refused("x", x=x.float())
    refused("x", x=torch.zeros(32, 4, dtype=BF16).t())
    refused("weight", weight=weight[:, :16].contiguous())
    refused("weight", x=x[:, :24].contiguous(), weight=weight[:, :24].contiguous())
    refused("out", out=out.half())
    refused("out", out=out.bfloat16(), add=True)
    refused("bias", bias=torch.zeros(7))
    refused("n_live", n_live=one.long())
    refused("weight", weight=weight.to("meta"))


# --- norm


@settings(max_examples=20, deadline=None)
@given(
    hidden=st.sampled_from([1, 31, 64, 576, 1030]),
    n=st.sampled_from([1, 5]),
    live=st.integers(0, 5),
    mode=st.sampled_from(["plain", "delta", "index"]),
    wide=st.booleans(),
)
def test_norm_equals_reference(hidden, n, live, mode, wide):
    g = torch.Generator().manual_seed(hidden + live)
    live = min(n, live)
    x = poisoned(live, normal(g, n, hidden) * 3)
    weight = normal(g, hidden, dtype=torch.float32 if wide else BF16)
    delta = poisoned(live, normal(g, n, hidden)) if mode == "delta" else None
    index = ints([-1, *reversed(range(live)), -1]) if mode == "index" else None
    out = torch.full((n if index is None else len(index), hidden), 7.0, dtype=BF16, device=DEVICE)
    other_x, expected = x.clone(), out.clone()
    norm_residual(x, weight, out, ints([live]), eps=1e-5, delta=delta, index=index)
    norm_residual_reference(other_x, weight, expected, ints([live]), eps=1e-5, delta=delta, index=index)
    torch.testing.assert_close(x, other_x, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out.float(), expected.float(), rtol=1e-2, atol=1e-6)


def test_norm_serves_256_rows_and_each_as_if_alone():
    g = torch.Generator().manual_seed(3)
    x, weight = normal(g, 256, 40), normal(g, 40)
    out, alone = torch.empty(256, 40, dtype=BF16, device=DEVICE), torch.empty(1, 40, dtype=BF16, device=DEVICE)
    norm_residual(x, weight, out, ints([256]), eps=1e-5)
    for row in (0, 128, 255):
        norm_residual(x[row : row + 1], weight, alone, ints([1]), eps=1e-5)
        assert torch.equal(alone[0], out[row])


def test_norm_refuses_wrong_arguments():
    x, weight, out = torch.zeros(2, 8), torch.zeros(8), torch.zeros(2, 8, dtype=BF16)
    one = torch.ones(1, dtype=torch.int32)

    def refused(argument: str, x=x, weight=weight, out=out, **more) -> None:
        with pytest.raises(ShapeError) as error:
            norm_residual(x, weight, out, one, eps=1e-5, **more)
        assert error.value.argument == argument

    refused("x", x=x.double())
    refused("x", x=torch.zeros(1, 20_000))
    refused("weight", weight=weight[:7])
    refused("out", out=out.float())
    refused("out", index=torch.zeros(3, dtype=torch.int32))
    refused("delta", delta=torch.zeros(1, 8))
    refused("index", index=one, delta=x)


# --- SwiGLU


@pytest.mark.parametrize(("n", "live"), [(1, 1), (6, 4), (256, 255)])
@pytest.mark.parametrize("ffn", [7, 1100])
def test_silu_mul_equals_reference(n, live, ffn):
    if n == 256:
        ffn = 3
    g = torch.Generator().manual_seed(ffn)
    gate_up = poisoned(live, normal(g, n, 2 * ffn) * 4)
    found, expected = (torch.full((n, ffn), 7.0, dtype=BF16, device=DEVICE) for _ in range(2))
    silu_mul(gate_up, found, ints([live]))
    silu_mul_reference(gate_up, expected, ints([live]))
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=1e-6)


def test_silu_mul_refuses_wrong_arguments():
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ShapeError):
        silu_mul(torch.zeros(2, 7), torch.zeros(2, 3, dtype=BF16), one)
    with pytest.raises(ShapeError):
        silu_mul(torch.zeros(2, 8), torch.zeros(2, 4), one)


# --- QKV


@settings(max_examples=20, deadline=None)
@given(
    heads=st.sampled_from(
        [(1, 1, 64), (3, 1, 64), (4, 1, 128), (7, 1, 64), (8, 1, 64), (9, 3, 64), (6, 6, 128), (28, 4, 128)]
    ),
    n=st.integers(1, 5),
    live=st.integers(0, 5),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_qkv_write_equals_reference(heads, n, live, bias, seed):
    n_heads, n_kv, head_dim = heads
    g = torch.Generator().manual_seed(seed)
    live = min(live, n)
    width = (n_heads + 2 * n_kv) * head_dim
    qkv = poisoned(live, normal(g, n, width))
    angle = torch.randn(50, head_dim // 2, generator=g).to(DEVICE)
    positions = ints(torch.randint(0, 50, (n,), generator=g).tolist())
    # one token a page, the second at a page's end, the third skipped
    slots = [7 * PAGE + 3, PAGE - 1, -1, 5 * PAGE, 2 * PAGE + 30][:n]
    tails = [PAGE - 4, 0, 9, PAGE - 1, 1][:n]
    pool = torch.full((2, 9, PAGE, n_kv, head_dim), NAN, dtype=BF16, device=DEVICE)
    q = torch.full((n, n_heads, head_dim), NAN, dtype=BF16, device=DEVICE)
    expected_pool, expected_q = pool.clone(), q.clone()
    arguments = (qkv, angle.cos(), angle.sin(), positions, ints(slots), ints(tails), ints([live]))
    b = normal(g, width) if bias else None
    qkv_rope_write(*arguments, q, pool, bias=b)
    qkv_rope_write_reference(*arguments, expected_q, expected_pool, bias=b)
    torch.testing.assert_close(q, expected_q, rtol=1e-2, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(pool, expected_pool, rtol=1e-2, atol=1e-5, equal_nan=True)
    assert bool(q[live:].isnan().all())


def test_qkv_write_refuses_wrong_arguments():
    column, one = torch.zeros(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    good = {
        "qkv": torch.zeros(2, 5 * 64),
        "cos": torch.zeros(9, 32),
        "sin": torch.zeros(9, 32),
        "positions": column,
        "slots": column,
        "tails": column,
        "n_live": one,
        "q": torch.zeros(2, 3, 64, dtype=BF16),
        "pool": torch.zeros(2, 4, PAGE, 1, 64, dtype=BF16),
    }
    for argument, value in {
        "qkv": torch.zeros(2, 4 * 64),
        "sin": torch.zeros(8, 32),
        "slots": column.long(),
        "tails": column[:1],
        "q": torch.zeros(2, 3, 64),
        "pool": torch.zeros(2, 4, PAGE, 1, 32, dtype=BF16),
        "bias": torch.zeros(3),
    }.items():
        with pytest.raises(ShapeError) as error:
            qkv_rope_write(**(good | {argument: value}))
        assert error.value.argument == argument
    odd = {"q": torch.zeros(2, 3, 64, dtype=BF16), "pool": torch.zeros(2, 4, PAGE, 2, 64, dtype=BF16)}
    with pytest.raises(ShapeError):
        qkv_rope_write(**(good | odd))
    narrow = {"q": torch.zeros(2, 3, 32, dtype=BF16), "pool": torch.zeros(2, 4, PAGE, 1, 32, dtype=BF16)}
    with pytest.raises(ShapeError):
        qkv_rope_write(**(good | narrow))
