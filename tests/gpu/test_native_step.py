"""The native step against a dense torch reference, on every level that this machine has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.native_kit import SMOL, Bench, Piece, random_weights, reference, tiny
from tests.sampling import oracle
from zl.errors import DeviceError, InvariantError, ShapeError
from zl.gpu.native.build import available_levels, have_compiler, pick_level
from zl.gpu.pinned import EOS, FIRST, LENGTH, NUMERIC, SAMPLE, SKIPPED
from zl.sampling.filter import KINDS
from zl.shapes import MAX_PIECES, RopeScaling

pytestmark = pytest.mark.skipif(not have_compiler(), reason="no C++ compiler or no AVX2: nothing native to test")

F32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "gqa3": {},
    "smol": {**SMOL, "n_layers": 1},
    "mha1": {"n_heads": 3, "n_kv_heads": 3},
    "gqa4_head128": {"n_heads": 4, "n_kv_heads": 1, "head_dim": 128, "tied": False},
    "gqa8_biases": {"n_heads": 8, "n_kv_heads": 1, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "odd_sizes": {"hidden": 100, "n_heads": 4, "n_kv_heads": 2, "head_dim": 40, "ffn": 75, "vocab": 333},
    "head80": {"n_heads": 2, "n_kv_heads": 1, "head_dim": 80},
    "head96": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 96, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64)},
    "mqa20": {"n_heads": 20, "n_kv_heads": 1, "head_dim": 32},
}


def prompt(n: int, vocab: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_kv_match_reference(case: str, dtype: torch.dtype, level: str) -> None:
    shape = tiny(**CASES[case])
    weights = random_weights(shape, dtype)
    ids = prompt(75, shape.vocab)
    with Bench(shape, weights, level=level) as bench:
        bench.seat(0, ids)
        bench.prefill(0, [50, 51, 52])  # a chunk, then two single tokens, then the rest
        got = [bench.step.logits()[0]]
        want, keys, values = reference(shape, weights, ids)
        bound = 1e-5 if dtype == F32 else 3e-2
        assert np.abs(got[0] - want[-1].numpy()).max() / want[-1].abs().max() < bound
        for layer in range(shape.n_layers):
            k, v = bench.step.read_kv(layer, 0, 0, len(ids))
            for found, right in ((k, keys[layer]), (v, values[layer])):
                error = np.abs(found - right.numpy())
                # In bf16 an element may round the other way once an ulp apart; on the whole it must not drift.
                assert error.max() / right.abs().max() < (1e-5 if dtype == F32 else 3e-2)
                assert error.mean() / right.abs().mean() < (1e-6 if dtype == F32 else 6e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", available_levels())
def test_greedy_decode_follows_reference(level: str, kind: str) -> None:
    shape = tiny()
    weights = random_weights(shape, F32)
    ids = prompt(30, shape.vocab)
    with Bench(shape, weights, level=level, penalty_filter=kind) as bench:
        bench.seat(3, ids, room=10)
        slot = bench.run(Piece(3, 0, 30, FIRST | SAMPLE))
        made = [int(slot.out_token[0])]
        for i in range(9):
            made.append(int(bench.run(Piece(3, 30 + i, 1, SAMPLE)).out_token[0]))
        assert bench.step.last_token[3] == made[-1]
        bits = bench.step.filter.bitmaps(bench.step.seen[3:4])[0]
        seen = {i for i in range(shape.vocab) if bits[i >> 5] >> (i & 31) & 1}
        assert seen == oracle.taken_for_seen([*ids, *made], shape.vocab, kind)
    for i, token in enumerate(made):
        assert token == int(reference(shape, weights, ids + made[:i])[0][-1].argmax())


def test_stop_flags_end_a_row_and_later_segments_are_skipped() -> None:
    shape = tiny()
    weights = random_weights(shape, F32)
    ids = prompt(5, shape.vocab)
    with Bench(shape, weights) as bench:
        bench.seat(0, ids, room=4)
        token = int(bench.run(Piece(0, 0, 5, FIRST | SAMPLE)).out_token[0])
    with Bench(replace(shape, eos_ids=(token,)), weights) as bench:
        for row in range(3):
            bench.seat(row, ids, room=4)
        bench.columns.row_flags[0] = 0
        bench.columns.max_new[2] = 1
        first = [Piece(row, 0, 5, FIRST | SAMPLE) for row in range(3)]
        slot = bench.run(*first)
        assert slot.out_flags[:3].tolist() == [EOS, 0, LENGTH]
        assert bench.step.done[:3].tolist() == [1, 0, 1]
        slot = bench.run(*(Piece(row, 5, 1, SAMPLE) for row in range(3)))
        assert slot.out_flags[[0, 2]].tolist() == [SKIPPED, SKIPPED]
        assert slot.out_flags[1] == 0
        assert set(bench.step.logits()) == {1}
        assert bench.run(*first).out_flags[:3].tolist() == [EOS, 0, LENGTH]  # FIRST wakes a row


def test_non_finite_row_ends_alone_and_its_pages_do_not_leak() -> None:
    shape = tiny()
    weights = random_weights(shape, BF16)
    weights["embed"][7] = torch.nan
    bad, good = [7, 3, 4], prompt(40, 7)
    for level in available_levels():
        with Bench(shape, weights, level=level, n_pages=4) as bench:
            bench.seat(0, good)
            alone = bench.prefill(0)
            bench.leave(0)
            bench.seat(0, bad, room=90)
            slot = bench.run(Piece(0, 0, 3, FIRST | SAMPLE))
            assert (slot.out_flags[0], slot.out_token[0], bench.step.done[0]) == (NUMERIC, -1, 1)
            for layer in range(shape.n_layers):  # poison every slot of every page
                nan = np.full((93, shape.n_kv_heads, shape.head_dim), np.nan, np.float32)
                bench.step.write_kv(layer, 0, 0, nan, nan)
            bench.leave(0)
            bench.free.reverse()
            bench.seat(0, good)
            assert bench.prefill(0).tobytes() == alone.tobytes()


def test_kv_round_trips_and_serves_a_restored_row() -> None:
    shape = tiny(head_dim=40)
    weights = random_weights(shape, F32)
    ids = prompt(70, shape.vocab)
    with Bench(shape, weights) as bench:
        bench.seat(0, ids)
        want = bench.prefill(0, [69])
        bench.seat(1, ids)
        for layer in range(shape.n_layers):
            bench.step.write_kv(layer, 1, 0, *bench.step.read_kv(layer, 0, 0, 69))
        bench.step.prompt_ids[1, :70] = ids
        bench.run(Piece(1, 69, 1, SAMPLE))
        assert bench.step.logits()[0].tobytes() == want.tobytes()


def test_broken_slots_are_refused_and_compute_nothing() -> None:
    shape = tiny()
    with Bench(shape, random_weights(shape, F32), step_tokens=32) as bench:
        bench.seat(0, prompt(40, shape.vocab))
        for piece, message in (
            (Piece(0, 0, 33, FIRST), "max_step_tokens"),
            (Piece(99, 0, 1, FIRST), "out of range"),
            (Piece(0, 250, 9, FIRST), "out of range"),
            (Piece(0, 60, 5, FIRST), "page table"),
        ):
            with pytest.raises(InvariantError, match=message):
                bench.run(piece)
        bench.run(Piece(0, 0, 32, FIRST))
        assert bench.step.times()["total"] > 0


def test_ids_are_read_from_any_byte_of_the_arena_and_only_in_a_rows_first_step() -> None:
    shape = tiny()
    weights, ids = random_weights(shape, F32), prompt(45, shape.vocab)
    arena = np.full(400, 255, np.uint8)
    with Bench(shape, weights, arena=arena) as bench:
        bench.seat(0, ids)
        want = bench.prefill(0, [20]).tobytes()
        for row, at in enumerate((0, 1, 2, 3), 1):
            bench.seat(row, ids)
            arena[at : at + 40] = np.array(ids[3:13], "<i4").view(np.uint8)
            arena[at + 200 : at + 320] = np.array(ids[14:44], "<i4").view(np.uint8)
            own = np.array([*ids[:3], ids[13], ids[44]], np.int32)
            bench.columns.put_prompt(row, own, [(~0, 3), (at, 10), (~3, 1), (at + 200, 30), (~4, 1)])
            bench.run(Piece(row, 0, 20, FIRST))
            arena.fill(255)
            bench.columns.own_ids[row] = -1
            bench.run(Piece(row, 20, 25, SAMPLE))
            assert bench.step.logits()[0].tobytes() == want
            assert bench.step.prompt_ids[row, :45].tolist() == ids


def test_a_prompt_that_lies_elsewhere_is_refused_and_nothing_is_read() -> None:
    shape = tiny()
    with Bench(shape, random_weights(shape, F32), arena=np.zeros(40, np.uint8)) as bench:
        bench.seat(0, prompt(12, shape.vocab))
        columns, room = bench.columns, bench.columns.own_ids.shape[1]
        columns.put_prompt(0, columns.own_ids[0, :2], [(~0, 2), (0, 10)])
        bench.run(Piece(0, 0, 12, FIRST))
        for name, value in {
            "piece_source": (1, 40, 2**62, -room - 2, -(2**63)), "n_pieces": (-1, 0, MAX_PIECES + 1),
            "prompt_len": (-1, 13, room + 1), "piece_at": (-1, 13, 2**31 - 1, -(2**31)), "piece_at first": (1, -1),
        }.items():  # fmt: skip
            column = getattr(columns, name.removesuffix(" first"))
            at = ((0, 0) if "first" in name else (0, 1)) if column.ndim == 2 else (0,)
            before = int(column[at])
            for wrong in value:
                column[at] = wrong
                with pytest.raises(InvariantError, match="own ids and the arena"):
                    bench.run(Piece(0, 0, 12, FIRST))
            column[at] = before
        bench.run(Piece(0, 0, 12, FIRST))


def test_two_steps_in_flight_end_in_order() -> None:
    shape = tiny()
    with Bench(shape, random_weights(shape, BF16), threads=2) as bench:
        bench.seat(0, prompt(20, shape.vocab), room=50)
        bench.plan([Piece(0, 0, 20, FIRST | SAMPLE)])
        a = bench.step.launch(0)
        bench.turn = 1
        bench.plan([Piece(0, 20, 1, SAMPLE)])
        b = bench.step.launch(1)
        bench.step.wait(b)
        ahead = [int(bench.slots[0].out_token[0]), int(bench.slots[1].out_token[0])]
        assert b == a + 1
        bench.turn = 0
        assert ahead[0] == int(bench.run(Piece(0, 0, 20, FIRST | SAMPLE)).out_token[0])
        assert ahead[1] == int(bench.run(Piece(0, 20, 1, SAMPLE)).out_token[0])


def test_wrong_sizes_and_levels_are_named() -> None:
    shape = tiny()
    weights = random_weights(shape, F32)
    weights["layers.1.wk"] = weights["layers.1.wk"][:-1]
    with pytest.raises(ShapeError, match="wk of layer 1"):
        Bench(shape, weights)
    with pytest.raises(DeviceError, match="neon"):
        pick_level("neon")


def test_compute_threads_have_a_name_that_the_kernel_shows():
    shape = tiny()
    with Bench(shape, random_weights(shape, torch.float32), threads=2) as bench:
        bench.seat(0, [1, 2, 3])
        bench.prefill(0)
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert names.count("zl-compute") >= 2
