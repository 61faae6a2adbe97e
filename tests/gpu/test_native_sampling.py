"""The step draws from what its head product measured: to the bit what the sampler draws from the logits alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu.native_kit import Bench, Piece, random_weights, tiny
from tests.sampling.native import NativeSampler
from zl.gpu.native.build import available_levels, have_compiler, library
from zl.gpu.pinned import FIRST, IGNORE_EOS, LOGPROBS, NUMERIC, SAMPLE
from zl.sampling.filter import KINDS
from zl.sampling.profiles import PROFILES

pytestmark = pytest.mark.skipif(not have_compiler(), reason="no C++ compiler or no AVX2: nothing native to test")

SETTINGS = [
    *((p.temperature, p.top_p, p.penalty) for p in PROFILES.values()),
    (0.0, 1.0, 1.0), (0.0, 0.9, 1.3), (1.0, 1.0, 1.0), (1.3, 1.0, 1.1), (0.6, 0.8, 0.9), (0.7, 0.0, 1.1),
]  # fmt: skip
BAD = 7  # a token whose embedding is no number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("vocab", "n_rows"), [(333, 3), (1024, 40), (97, 9)])
def test_a_step_draws_as_the_sampler_alone(vocab: int, n_rows: int, dtype: torch.dtype, level: str, kind: str) -> None:
    shape = tiny(vocab=vocab, tied=False)
    weights = random_weights(shape, dtype)
    weights["head"] *= 6  # peaks and a tail, as models have
    weights["embed"][BAD] = torch.nan
    rng = np.random.default_rng(vocab)
    with Bench(shape, weights, rows=n_rows, threads=2, level=level, penalty_filter=kind) as bench:
        columns = bench.columns
        for row in range(n_rows):
            columns.temperature[row], columns.top_p[row], columns.penalty[row] = SETTINGS[row % len(SETTINGS)]
            columns.row_flags[row] = IGNORE_EOS | LOGPROBS * (row % 2)
            columns.seed[row] = row
            ids = (8 + rng.integers(0, vocab - 8, 5)).tolist()
            bench.seat(row, [*ids[:3], BAD, ids[4]] if row == 1 else ids, room=4)
        alone = NativeSampler(level, library(level), vocab, suffix="")
        try:
            for turn in range(3):
                pieces = [
                    Piece(row, 0, 5, FIRST | SAMPLE) if not turn else Piece(row, 4 + turn, 1, SAMPLE)
                    for row in range(n_rows) if not turn or row != 1
                ]  # fmt: skip
                before = bench.step.seen.copy()
                slot = bench.run(*pieces)
                logits = bench.step.logits()
                for i, piece in enumerate(pieces):
                    row = piece.row
                    prompt = columns.own_ids[row, :5]
                    seen = alone.bitmap(before[row], kind) if turn else alone.seen(prompt, (), kind)
                    token, logprob, flags = alone.row(
                        logits[i], seen=seen, temperature=columns.temperature[row], top_p=columns.top_p[row],
                        penalty=columns.penalty[row], seed=row, index=turn, logprob=row % 2,
                    )  # fmt: skip
                    assert flags == (NUMERIC if row == 1 else 0)
                    got = (int(slot.out_token[i]), float(slot.out_logprob[i]), int(slot.out_flags[i]))
                    assert got == (token, logprob, flags), (row, turn)
        finally:
            alone.close()
