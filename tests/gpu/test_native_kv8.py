"""Keys and values in eight bits: their bits, their accuracy, their independence, their memory, their torch twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu.native_kit import Bench, Piece, random_weights, reference, tiny
from zl.errors import ShapeError
from zl.gpu.fallback import EagerStep, NativePool8, open_pool, quantise
from zl.gpu.model import Weights
from zl.gpu.native.build import available_levels, have_compiler
from zl.gpu.native.needs import pool_bytes
from zl.gpu.pinned import FIRST, SAMPLE
from zl.shapes import PAGE, Shapes

pytestmark = pytest.mark.skipif(not have_compiler(), reason="no C++ compiler or no AVX2: nothing native to test")

BF16 = torch.bfloat16
SHAPES = {
    "gqa3": tiny(),
    "gqa8_head128": tiny(hidden=256, n_heads=8, n_kv_heads=1, head_dim=128, vocab=1000),
    "gqa12_head32": tiny(hidden=192, n_heads=12, n_kv_heads=1, head_dim=32),  # both bytes need a tile of their own
    "mha_head80": tiny(hidden=160, n_heads=2, n_kv_heads=2, head_dim=80),  # padded to 96
}
LEVELS = available_levels()


def kept(x: np.ndarray) -> np.ndarray:
    """What eight bits keep of bf16 rows [..., n], in NumPy alone; as float32."""
    most = np.abs(x).max(-1, keepdims=True)
    scale = rounded(most / np.float32(127))
    by = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return np.rint(x * by).astype(np.int8).astype(np.float32) * scale


def rounded(x: np.ndarray) -> np.ndarray:
    """Round float32 to bf16, half to even, by its bits."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def snapshot(bench: Bench, row: int, count: int) -> bytes:
    parts = [bench.step.read_kv(layer, row, 0, count) for layer in range(bench.step.shape.n_layers)]
    return b"".join(array.tobytes() for pair in parts for array in pair)


@pytest.fixture(params=[(s, lv) for s in SHAPES for lv in LEVELS], ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple:
    """A shape, its weights and a level."""
    shape, level = request.param
    return SHAPES[shape], random_weights(SHAPES[shape], BF16), level


def test_what_is_kept_is_the_numpy_references_to_the_bit(case: tuple) -> None:
    """Layer 0 has the keys and values of a bf16 step: what eight bits make of them is known."""
    shape, weights, level = case
    ids = np.random.default_rng(1).integers(0, shape.vocab, 75).tolist()
    found = {}
    for kv in ("auto", "int8"):
        with Bench(shape, weights, level=level, kv=kv, n_pages=8) as bench:
            bench.seat(0, ids)
            bench.prefill(0, [1, 2, 30, 33, 41])  # whole fours of tokens, single ones, and both sides of a page's end
            found[kv] = bench.step.read_kv(0, 0, 0, len(ids))
    for plain, eight in zip(found["auto"], found["int8"], strict=True):
        assert eight.tobytes() == kept(plain).tobytes()
        assert np.abs(eight - plain).max() > 0
        error, most = np.abs(eight - plain), np.abs(plain).max(-1, keepdims=True)
        assert (error <= most / 127 * 0.51).all()


def test_chunks_and_neighbours_and_threads_never_change_a_bit(case: tuple) -> None:
    shape, weights, level = case
    rng = np.random.default_rng(3)
    ids = rng.integers(0, shape.vocab, 133).tolist()
    seen = set()
    for threads in (1, 2):
        with Bench(shape, weights, level=level, kv="int8", n_pages=64, threads=threads) as bench:
            for trial, cuts in enumerate([[], list(range(1, 133)), [132], [32, 64, 96], [5, 37, 38, 100]]):
                row = trial % 4
                bench.seat(row, ids, room=4)
                bench.prefill(row, cuts)
                for other in range(4, 4 + trial):  # rows that prefill and decode in the same steps
                    bench.seat(other, rng.integers(0, shape.vocab, 20 + 9 * other).tolist(), room=4)
                    bench.prefill(other)
                logits = []
                for i in range(3):
                    others = [(r, int(bench.columns.prompt_len[r])) for r in range(4, 4 + trial)]
                    pieces = [Piece(r, n + i, 1, SAMPLE) if r % 2 else Piece(r, 0, n, FIRST) for r, n in others]
                    place = trial // 2
                    pieces.insert(place, Piece(row, 133 + i, 1, SAMPLE))
                    bench.run(*pieces)
                    logits.append(bench.step.logits()[place].tobytes())
                seen.add((*logits, snapshot(bench, row, 136)))
                for each in (row, *range(4, 4 + trial)):
                    bench.leave(each)
    assert len(seen) == 1


def test_logits_are_near_the_float_reference(case: tuple) -> None:
    shape, weights, level = case
    ids = np.random.default_rng(6).integers(0, shape.vocab, 100).tolist()
    want = reference(shape, weights, ids)[0][-1].numpy()
    off = {}
    for kv in ("auto", "int8"):
        with Bench(shape, weights, level=level, kv=kv, n_pages=8) as bench:
            bench.seat(0, ids)
            off[kv] = np.abs(bench.prefill(0) - want).mean() / want.std()
    assert off["auto"] < 0.01
    assert off["auto"] / 2 < off["int8"] < 0.02  # of the logits' own spread


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_levels_without_whole_numbers_on_tiles_agree_with_those_that_have_them(level: str) -> None:
    shape = SHAPES["gqa3"]
    weights, ids = random_weights(shape, BF16), list(range(90))
    logits = {}
    for each in (level, LEVELS[-1]):
        with Bench(shape, weights, level=each, kv="int8", n_pages=8) as bench:
            bench.seat(0, ids)
            logits[each] = bench.prefill(0)
    assert np.abs(logits[level] - logits[LEVELS[-1]]).mean() < 0.01 * logits[level].std()


@pytest.mark.parametrize("level", LEVELS)
def test_a_key_or_value_that_is_not_finite_reaches_its_own_row_alone(level: str) -> None:
    """And what a page's former owner left does not reach its next one."""
    shape, ids = SHAPES["gqa3"], list(range(3, 50))
    weights = random_weights(shape, BF16)
    for which in (0, 1):
        with Bench(shape, weights, level=level, kv="int8", n_pages=4) as bench:
            bench.seat(0, ids, room=3)
            bench.seat(1, ids, room=3)
            clean = bench.prefill(0)
            assert np.isfinite(clean).all()
            bench.prefill(1)
            kv = list(bench.step.read_kv(0, 1, 0, len(ids)))
            kv[which][7, 0, 5] = np.inf if which else np.nan
            bench.step.write_kv(0, 1, 0, *kv)
            assert np.isnan(bench.step.read_kv(0, 1, 7, 1)[which][0, 0]).all()
            bench.run(Piece(0, 47, 1, SAMPLE), Piece(1, 47, 1, SAMPLE))
            logits = bench.step.logits()
            assert np.isfinite(logits[0]).all()
            assert np.isnan(logits[1]).all()
            bench.step.pool()[0].view(np.uint16)[..., : 2 * PAGE] = 0x7FC0  # every scale
            for row in (0, 1):
                bench.leave(row)
            bench.seat(1, ids)
            assert bench.prefill(1, [20, 33]).tobytes() == clean.tobytes()


def test_memory_is_halved_and_counted() -> None:
    shape = tiny(hidden=768, n_heads=12, n_kv_heads=4, ffn=320)
    sizes = {}
    for kv in ("auto", "int8"):
        with Bench(shape, random_weights(shape, BF16), kv=kv, n_pages=128) as bench:
            pool = bench.step.pool()[0]
            sizes[kv] = bench.step.memory["kv_pool"]
            assert pool.nbytes == sizes[kv] == pool_bytes(shape, 128, bench.step.kv)
            assert ("int8" in bench.step.name) == (kv == "int8")
    assert sizes["int8"] / sizes["auto"] == (64 + 2) / 128


def test_float32_has_no_eight_bits() -> None:
    shape = tiny()
    with pytest.raises(ShapeError, match="kv"):
        Bench(shape, random_weights(shape, torch.float32), kv="int8")
    with pytest.raises(ShapeError, match="kv"):
        Bench(shape, random_weights(shape, BF16), kv="int4")


@pytest.mark.parametrize("name", SHAPES)
def test_the_torch_twin_goes_on_where_the_native_step_left_off_and_back(name: str) -> None:
    shape = SHAPES[name]
    weights = random_weights(shape, BF16)
    ids = np.random.default_rng(8).integers(0, shape.vocab, 70).tolist()
    with Bench(shape, weights, kv="int8", n_pages=8) as bench:
        bench.seat(0, ids, room=8)
        bench.seat(1, ids, room=8)
        bench.prefill(0)
        pool = open_pool(bench.step)
        assert isinstance(pool, NativePool8)
        pages = torch.from_numpy(bench.columns.page_table[0, :3].astype(np.int64))
        for own, found in zip(bench.step.read_kv(1, 0, 0, 70), pool.read(1, pages), strict=True):
            assert found[:70].numpy().tobytes() == own.tobytes()
        sizes = Shapes(max_rows=8, max_model_len=256, n_pages=8)
        twin = EagerStep(bench.step, Weights(shape, BF16, weights), bench.columns, bench.slots, sizes, pool=pool)
        bench.plan([Piece(1, 0, 70, FIRST | SAMPLE)])
        twin.wait(twin.launch(bench.turn))
        for layer in range(shape.n_layers):
            for a, b in zip(bench.step.read_kv(layer, 0, 0, 70), bench.step.read_kv(layer, 1, 0, 70), strict=True):
                assert np.abs(a - b).max() <= 0.03 * np.abs(a).max()
        bench.step.last_token[:2] = 9
        bench.run(Piece(0, 70, 1, SAMPLE), Piece(1, 70, 1, SAMPLE))  # native again, over what the twin has written
        logits = bench.step.logits()
        assert np.abs(logits[0] - logits[1]).mean() < 0.02 * logits[0].std()


def test_the_twin_quantises_to_the_native_bits() -> None:
    shape = SHAPES["mha_head80"]
    g = torch.Generator().manual_seed(2)
    x = (torch.randn(40, 2, 80, generator=g) * torch.logspace(-25, 5, 40)[:, None, None]).to(BF16)
    x[3, 0] = 0
    x[4, 1, 17] = torch.nan
    x[5, 1, 3] = -torch.inf
    numbers, scale = quantise(x)
    want = (numbers.float() * scale.float()[..., None]).numpy()
    with Bench(shape, random_weights(shape, BF16), kv="int8", n_pages=4) as bench:
        bench.seat(0, [1] * 40)
        bench.step.write_kv(0, 0, 0, x.float().numpy(), x.float().numpy())
        k, v = bench.step.read_kv(0, 0, 0, 40)
    assert np.isnan(want[4, 1]).all()
    assert np.isnan(want[5, 1]).all()
    assert (want[:3] == 0).all()
    np.testing.assert_array_equal(k, want)
    np.testing.assert_array_equal(v, want)
    np.testing.assert_array_equal(want[10:], kept(x[10:].float().numpy()))
