"""A row's bits depend on nothing but itself: neighbours, chunking, row place, pages and threads change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu.native_kit import Bench, Piece, random_weights, tiny
from zl.gpu.native.build import available_levels, have_compiler
from zl.gpu.pinned import FIRST, SAMPLE

pytestmark = pytest.mark.skipif(not have_compiler(), reason="no C++ compiler or no AVX2: nothing native to test")

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
SHAPES = {"gqa3": tiny(), "gqa8_head128": tiny(hidden=256, n_heads=8, n_kv_heads=1, head_dim=128, vocab=1000)}


def snapshot(bench: Bench, row: int, count: int) -> bytes:
    """All keys and values of a row."""
    parts = [bench.step.read_kv(layer, row, 0, count) for layer in range(bench.step.shape.n_layers)]
    return b"".join(array.tobytes() for pair in parts for array in pair)


def generate(bench: Bench, row: int, n: int) -> list[tuple[int, bytes]]:
    """Decode n tokens alone, from position prompt_len on: token and logits of each."""
    out = []
    start = int(bench.columns.prompt_len[row])
    for i in range(n):
        slot = bench.run(Piece(row, start + i, 1, SAMPLE))
        out.append((int(slot.out_token[0]), bench.step.logits()[0].tobytes()))
    return out


@pytest.fixture(params=[(s, d, lv) for s in SHAPES for d in DTYPES for lv in available_levels()], ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple:
    """A shape, its weights and a level."""
    shape, dtype, level = request.param
    return SHAPES[shape], random_weights(SHAPES[shape], DTYPES[dtype]), level


def test_chunking_never_changes_a_bit(case: tuple) -> None:
    shape, weights, level = case
    rng = np.random.default_rng(3)
    ids = rng.integers(0, shape.vocab, 150).tolist()
    with Bench(shape, weights, level=level, n_pages=16) as bench:
        seen = set()
        for trial in range(6):
            cuts = [[], list(range(1, 150)), [149], [32, 64, 96, 128]][trial] if trial < 4 else sorted(
                rng.choice(np.arange(1, 150), 7, replace=False).tolist()
            )  # fmt: skip
            row = trial % 4
            bench.seat(row, ids)
            logits = bench.prefill(row, cuts)
            seen.add((logits.tobytes(), snapshot(bench, row, 150)))
            bench.leave(row)
        assert len(seen) == 1


def test_neighbours_and_threads_never_change_a_bit(case: tuple) -> None:
    shape, weights, level = case
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 60, 70).tolist()
    prompts = [rng.integers(0, shape.vocab, n).tolist() for n in lengths]
    watched = (0, 33, 69)
    kind = "exact" if shape is SHAPES["gqa3"] else "bloom"  # each with both dtypes, on every level
    runs = []
    for threads in (1, 2):
        with Bench(
            shape, weights, level=level, rows=70, n_pages=300, step_tokens=512, threads=threads, penalty_filter=kind
        ) as bench:
            bench.columns.seed[:] = np.arange(70) + 9
            bench.columns.temperature.fill(0.8)
            bench.columns.penalty.fill(1.1)
            bench.columns.top_p.fill(0.9)
            for row in watched:  # alone, in its own seat
                bench.seat(row, prompts[row], room=8)
                bench.prefill(row)
                runs.append((row, bench.step.last_token[row], snapshot(bench, row, lengths[row])))
                runs[-1] = (*runs[-1], generate(bench, row, 4))
                bench.leave(row)
            for row in range(70):
                bench.seat(row, prompts[row], room=8)
            first: dict[int, int] = {}
            kept: dict[int, list[tuple[int, bytes]]] = {row: [] for row in watched}
            done = [0] * 70  # tokens computed
            while len(kept[watched[-1]]) < 5 or len(kept[0]) < 5 or len(kept[33]) < 5:
                # Prefill in random pieces beside decoding rows, in a random order of segments.
                pieces, budget = [], 512
                for row in rng.permutation(70).tolist():
                    left = lengths[row] - done[row]
                    count = min(budget, int(rng.integers(1, left + 1)) if left > 0 else 1)
                    if count <= 0 or (left <= 0 and done[row] >= lengths[row] + 7):
                        continue
                    last = left <= 0 or count == left
                    flags = (FIRST if not done[row] else 0) | (SAMPLE if last else 0)
                    pieces.append(Piece(row, done[row], count, flags))
                    done[row] += count
                    budget -= count
                slot = bench.run(*pieces)
                logits = bench.step.logits()
                for i, piece in enumerate(pieces):
                    if piece.row in watched and piece.flags & SAMPLE:
                        token = int(slot.out_token[i])
                        if piece.row not in first:
                            first[piece.row] = token
                        kept[piece.row].append((token, logits[i].tobytes()))
            for row in watched:
                runs.append((row, first[row], snapshot(bench, row, lengths[row]), kept[row][1:5]))
    for row in watched:
        mine = [run for run in runs if run[0] == row]
        assert len(mine) == 4
        assert all(run == mine[0] for run in mine[1:])


@pytest.mark.parametrize("level", available_levels())
def test_steps_of_every_size_give_the_same_bits(level: str) -> None:
    """Sizes at which products are cut otherwise: 32 rows stream by, 256 are shared by rows, 512 fill a panel's sums.

    320 and 640 wide, the matrices have two and three panels. 16 threads are more than there are parts of rows.
    """
    shape, n = tiny(n_layers=2, hidden=320, n_heads=5, n_kv_heads=1, ffn=640, max_position=1024), 620
    ids = np.random.default_rng(5).integers(0, shape.vocab, n).tolist()
    for dtype in DTYPES.values():
        weights, seen = random_weights(shape, dtype), set()
        for threads in (1, 2, 16):
            with Bench(
                shape, weights, level=level, rows=1, model_len=672, n_pages=21, step_tokens=640, threads=threads
            ) as bench:
                for cuts in ([], [20], [300], [40, 90, 350], [1, 33, 66, 322]):
                    bench.seat(0, ids)
                    logits = bench.prefill(0, cuts)
                    seen.add((logits.tobytes(), snapshot(bench, 0, n)))
                    bench.leave(0)
        assert len(seen) == 1


@pytest.mark.parametrize("n_rows", [1, 2, 15, 16, 17, 31, 33, 48, 100, 256])
def test_every_row_of_a_batch_equals_the_same_row_alone(n_rows: int) -> None:
    shape, level = tiny(n_layers=1), available_levels()[0]
    weights = random_weights(shape, torch.bfloat16)
    with Bench(shape, weights, level=level, rows=256, n_pages=257, threads=2) as bench:
        bench.seat(0, [11, 12, 13], room=2)
        alone = bench.prefill(0).tobytes()
        bench.leave(0)
        for row in range(n_rows):
            bench.seat(row, [row % 500, 12, 13] if row % 3 else [11, 12, 13], room=2)
        bench.run(*(Piece(row, 0, 2, FIRST) for row in range(min(n_rows, 128))))
        if n_rows > 128:
            bench.run(*(Piece(row, 0, 2, FIRST) for row in range(128, n_rows)))
        bench.run(*(Piece(row, 2, 1, SAMPLE) for row in range(n_rows)))
        logits = bench.step.logits()
        assert len(logits) == n_rows
        assert all(logits[row].tobytes() == alone for row in range(0, n_rows, 3))
