"""The CUDA step in its dry mode (interpreted, uncaptured) against the torch twin; on a GPU the same, captured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.gpu.kernel_kit import DEVICE, exact_dots
from zl.errors import InvariantError, ShapeError
from zl.gpu import cuda_memory
from zl.gpu.cuda_memory import token_buckets
from zl.gpu.cuda_step import CudaStep
from zl.gpu.model import Weights
from zl.gpu.pinned import EOS, FIRST, LENGTH, NUMERIC, SAMPLE, SKIPPED, RowColumns, StepSlot
from zl.gpu.pool import KVPool
from zl.gpu.torch_step import TorchStep
from zl.sampling.filter import KINDS
from zl.shapes import PAGE, ModelShape, Shapes

# The sampler subtracts infinities in lanes past the vocabulary, and one test is about a row of NaN: NumPy tells.
pytestmark = [
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

SHAPE = ModelShape(
    name="tiny", n_layers=2, hidden=64, n_heads=3, n_kv_heads=1, head_dim=64, ffn=96, vocab=61, max_position=128,
    rms_eps=1e-5, rope_theta=10_000.0, attention_bias=True, eos_ids=(60,),
)  # fmt: skip
SHAPES = Shapes(max_rows=3, max_model_len=96, step_tokens=48, n_pages=12)


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def matrix(n_out: int, n_in: int) -> torch.Tensor:
        return (torch.randn(n_out, n_in, generator=g) * n_in**-0.5).bfloat16()

    def vector(n: int) -> torch.Tensor:
        return torch.randn(n, generator=g) * 0.1 + 1

    tensors = {"embed": torch.randn(SHAPE.vocab, SHAPE.hidden, generator=g).bfloat16(), "norm": vector(SHAPE.hidden)}
    for i in range(SHAPE.n_layers):
        layer = {
            "attn_norm": vector(64), "mlp_norm": vector(64), "wq": matrix(192, 64), "wk": matrix(64, 64),
            "wv": matrix(64, 64), "wo": matrix(64, 192), "w_gate": matrix(96, 64), "w_up": matrix(96, 64),
            "w_down": matrix(64, 96), "bq": vector(192) - 1, "bk": vector(64) - 1, "bv": vector(64) - 1,
        }  # fmt: skip
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def on_device(array: np.ndarray) -> np.ndarray:
    """Give columns that the kernels can reach: pinned where there is a GPU."""
    return array if DEVICE == "cpu" else torch.from_numpy(array).pin_memory().numpy()


class Bench:
    """Columns, two slots and one engine; rows are seated with pages in a scattered order."""

    def __init__(self, make):
        self.columns = RowColumns(SHAPES, lambda shape, dtype: on_device(np.zeros(shape, dtype)))
        self.slots = [StepSlot(SHAPES, lambda shape, dtype: on_device(np.zeros(shape, dtype))) for _ in range(2)]
        self.engine = make(self.columns, self.slots)
        self.turn = 0

    def seat(self, row: int, prompt: list[int], *, max_new: int = 9, temperature: float = 0.0, seed: int = 1) -> None:
        c = self.columns
        c.put_ids(row, prompt)
        c.max_new[row], c.row_flags[row] = max_new, 0
        c.page_table[row] = [11 - row, 3 + row, 8 - row][: c.page_table.shape[1]]
        c.temperature[row], c.top_p[row], c.penalty[row], c.seed[row] = temperature, 0.9, 1.2, seed

    def step(self, *segments: tuple[int, int, int, int]) -> list[tuple[int, float, int]]:
        slot, self.turn = self.slots[self.turn], 1 - self.turn
        slot.n_segs[0] = len(segments)
        for s, segment in enumerate(segments):
            slot.seg_row[s], slot.seg_start[s], slot.seg_len[s], slot.seg_flags[s] = segment
        self.engine.wait(self.engine.launch(1 - self.turn))
        columns = (slot.out_token, slot.out_logprob, slot.out_flags)
        return list(zip(*(column[: len(segments)].tolist() for column in columns), strict=True))


def dry(shape: ModelShape = SHAPE, tensors: dict[str, torch.Tensor] | None = None, kind: str = "exact") -> Bench:
    device = "cpu" if DEVICE == "cpu" else "cuda:0"
    source = tensors or make_tensors()
    return Bench(
        lambda columns, slots: CudaStep(shape, source, columns, slots, SHAPES, device=device, penalty_filter=kind)
    )


def twin(kind: str) -> Bench:
    weights = Weights(SHAPE, torch.bfloat16, make_tensors())
    return Bench(lambda columns, slots: TorchStep(SHAPE, weights, columns, slots, SHAPES, penalty_filter=kind))


PROMPT = [(7 * i + 3) % 59 for i in range(40)]


def serve(bench: Bench) -> list[tuple[int, float, int]]:
    """Serve two rows in mixed steps: chunks that cross a page, single tokens, a row that ends, a row reused."""
    bench.seat(0, PROMPT[:35])
    bench.seat(2, PROMPT[3:8], temperature=0.8, seed=2**63 + 5, max_new=2)
    seen = bench.step((0, 0, PAGE - 2, FIRST), (2, 0, 5, FIRST | SAMPLE))
    seen += bench.step((2, 5, 1, SAMPLE), (0, PAGE - 2, 5, SAMPLE))
    seen += bench.step((2, 6, 1, SAMPLE), (0, 35, 1, SAMPLE))
    bench.seat(2, PROMPT[5:9], temperature=1.0, seed=3)
    seen += bench.step((0, 36, 1, SAMPLE), (2, 0, 4, FIRST | SAMPLE))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_dry_step_equals_the_torch_twin(kind):
    mine, other = dry(kind=kind), twin(kind)
    found, expected = serve(mine), serve(other)
    assert (mine.engine._rows.seen.cpu().numpy().view(np.uint32) == other.engine._seen).all()
    assert [(t, f) for t, _, f in found] == [(t, f) for t, _, f in expected]
    assert [f for _, _, f in found][2] & LENGTH
    assert [f for _, _, f in found][4] == SKIPPED
    np.testing.assert_allclose([p for _, p, _ in found], [p for _, p, _ in expected], atol=0.03)


def test_a_rows_bits_do_not_depend_on_neighbours_chunks_or_pages():
    with exact_dots():
        shape = replace(SHAPE, n_layers=1)
        alone, crowded = dry(shape), dry(shape)
        # The pool starts zeroed; in service pages come back dirty.
        crowded.engine._pool.fill_(float("nan"))
        alone.seat(1, PROMPT[:34], temperature=0.9, seed=7)
        first = alone.step((1, 0, 34, FIRST | SAMPLE)) + alone.step((1, 34, 1, SAMPLE))
        crowded.seat(0, PROMPT[9:14])
        crowded.seat(1, PROMPT[:34], temperature=0.9, seed=7)
        crowded.step((0, 0, 5, FIRST | SAMPLE), (1, 0, 33, FIRST))
        second = [crowded.step((0, 5, 1, SAMPLE), (1, 33, 1, SAMPLE))[1], crowded.step((1, 34, 1, SAMPLE))[0]]
        assert second == first


def test_a_row_that_is_not_finite_fails_alone():
    tensors = make_tensors()
    tensors["embed"] = tensors["embed"].clone()
    tensors["embed"][59] = float("nan")
    bench = dry(replace(SHAPE, tied=False, n_layers=1), tensors | {"head": make_tensors()["embed"]})
    bench.seat(0, [1, 2, 59])
    bench.seat(1, [1, 2, 3])
    bad, good = bench.step((0, 0, 3, FIRST | SAMPLE), (1, 0, 3, FIRST | SAMPLE))
    assert bad == (-1, 0.0, NUMERIC)
    assert good[0] >= 0
    assert good[2] & (NUMERIC | EOS) == 0
    assert bench.step((0, 3, 1, SAMPLE))[0][2] == SKIPPED


def test_engine_refuses_what_it_cannot_run():
    bench = dry()
    bench.seat(0, PROMPT)
    with pytest.raises(InvariantError):
        bench.step((0, 0, 49, FIRST))
    with pytest.raises(InvariantError):
        bench.engine.wait(1)
    with pytest.raises(ShapeError):
        CudaStep(replace(SHAPE, head_dim=80), {}, bench.columns, bench.slots, SHAPES, device="cpu")
    bench.engine.close()


def test_buckets_are_captured_widest_first():
    assert token_buckets(512) == (512, 256, 64, 16)
    assert token_buckets(48) == (48, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_plan_counts_what_the_step_allocates(kind):
    for shape in (SHAPE, replace(SHAPE, tied=False, attention_bias=False)):
        tensors = make_tensors() | ({} if shape.tied else {"head": make_tensors()["embed"]})
        biases = shape.attention_bias
        engine = dry(shape, {name: t for name, t in tensors.items() if biases or ".b" not in name}, kind).engine
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in engine.device_tensors()}
        pool = sizes.pop("pool")
        assert pool == SHAPES.n_pages * KVPool.page_bytes(shape, torch.bfloat16)
        weights = sum(n for name, n in sizes.items() if name.startswith("layers.") or name in ("embed", "norm", "head"))
        assert weights == cuda_memory.weight_bytes(shape)
        assert sum(sizes.values()) - weights == cuda_memory.buffer_bytes(shape, SHAPES, penalty_filter=kind)


def test_debug_mode_refuses_a_step_after_anything_moved():
    bench = Bench(
        lambda columns, slots: CudaStep(
            replace(SHAPE, n_layers=1), make_tensors(), columns, slots, SHAPES,
            device="cpu" if DEVICE == "cpu" else "cuda:0", debug_addresses=True,
        )
    )  # fmt: skip
    bench.seat(0, PROMPT[:3])
    bench.step((0, 0, 3, FIRST | SAMPLE))
    array = bench.columns.prompt_len
    bench.columns.prompt_len = array.copy()
    with pytest.raises(InvariantError, match=r"columns\.prompt_len"):
        bench.step((0, 3, 1, SAMPLE))
    bench.columns.prompt_len = array
    bench.slots[1].out_token, kept = bench.slots[1].out_token.copy(), bench.slots[1].out_token
    with pytest.raises(InvariantError, match=r"slot 1\.out_token"):
        bench.step((0, 3, 1, SAMPLE))
    bench.slots[1].out_token = kept
    bench.engine._pool = bench.engine._pool.clone()
    with pytest.raises(InvariantError, match="pool"):
        bench.step((0, 3, 1, SAMPLE))
