"""zl/gpu/native/sample_nucleus.hpp and sample_cut.hpp: nuclei of thousands of tokens, at a real vocabulary."""

import numpy as np
import pytest

from tests.sampling import oracle
from tests.sampling.native import bitmap

VOCAB = 49_152
SETTINGS = {"temperature": 0.9, "top_p": 0.99, "penalty": 1.2}


@pytest.mark.parametrize("kind", ["smooth", "ties"])
def test_wide_nuclei_are_drawn_alike_at_every_level(native_levels, native, kind):
    rng = np.random.default_rng(63)
    x = rng.normal(0, 2.5, VOCAB)
    x = (np.round(x * 4) / 4 if kind == "ties" else x).astype(np.float32)
    seen = rng.random(VOCAB) < 0.01
    words = bitmap(seen)
    kept, drawn = {}, {}
    for level in native_levels:
        s = native(level, VOCAB)
        kept[level] = s.kept(x, seen=words, **SETTINGS)
        drawn[level] = [s.row(x, seen=words, seed=i, index=i, **SETTINGS) for i in range(500)]
        tokens = [token for token, _, _ in drawn[level]]
        assert kept[level][tokens].all()
        assert len({token // 4096 for token in tokens}) == VOCAB // 4096, "draws reach all of the vocabulary"
    penalty, temperature, top_p = (float(np.float32(SETTINGS[k])) for k in ("penalty", "temperature", "top_p"))
    wanted = oracle.kept(oracle.penalised(x, seen.nonzero()[0], penalty), temperature, top_p)
    assert 3_000 < wanted.sum() < VOCAB
    for level, one in kept.items():
        assert (one != wanted).sum() <= 1, level
    if {"avx512", "avx2"} <= drawn.keys():
        assert drawn["avx512"] == drawn["avx2"], "levels with fused multiply-add agree to the last bit"


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 20, 31, 32, 33])
def test_draws_among_equals_reach_the_last_one_that_is_kept(native_levels, native, n):
    x = np.zeros(40, np.float32)
    for level in native_levels:
        s = native(level, 40)
        top_p = (n - 0.5) / 40
        assert s.kept(x, top_p=top_p).nonzero()[0].tolist() == list(range(n))
        assert {s.row(x, top_p=top_p, seed=i)[0] for i in range(1_000)} == set(range(n)), level
