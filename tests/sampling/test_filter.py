"""zl/sampling/filter.py and its twin in C++: the same bits; false positives as the textbook has them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sampling import oracle
from tests.sampling.native import bitmap
from zl.errors import ShapeError
from zl.sampling.filter import BLOOM_WORDS, KINDS, Filter

VOCABS = (1, 31, 32, 33, 512, 1_000, 49_152, 151_936)


def built(form: Filter, ids) -> np.ndarray:
    row = np.zeros(form.words, np.uint32)
    form.add(row, np.array(ids, np.int64))
    return row


def plain(ids, vocab, kind) -> np.ndarray:
    mask = np.zeros(vocab, bool)
    mask[list(oracle.taken_for_seen(ids, vocab, kind))] = True
    return bitmap(mask)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 512, 1_000, 5_000])
def test_a_filter_holds_what_plain_integers_say(vocab, kind):
    rng, form = np.random.default_rng(vocab), Filter(kind, vocab)
    for n in (0, 1, 40, 900):
        ids = rng.integers(0, vocab, n)
        row = built(form, [*ids, -1, vocab, vocab + 31, *ids[:3]])
        found = form.bitmaps(np.stack([np.zeros_like(row), row]))
        assert (found == [plain([], vocab, kind), plain(ids, vocab, kind)]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_native_filter_has_the_same_bits(native_levels, native, kind):
    rng = np.random.default_rng(2)
    for vocab in VOCABS:
        form = Filter(kind, vocab)
        ids, later = rng.integers(0, vocab, 700), rng.integers(0, vocab, 3)
        row = built(form, [*ids, *later])
        for level in native_levels:
            s = native(level, vocab)
            assert (s.row_filter([*ids, -1, vocab, vocab + 31], later, kind) == row).all()
            assert (s.bitmap(row, kind) == form.bitmaps(row[None])[0]).all()
            full = np.full_like(row, 0xFFFFFFFF)
            assert kind == "exact" or (s.bitmap(full, kind) == bitmap(np.ones(vocab, bool))).all()


def test_a_bloom_filter_is_4_kib_and_an_exact_one_a_bit_a_token():
    assert [Filter("bloom", vocab).words for vocab in VOCABS] == [BLOOM_WORDS] * len(VOCABS)
    assert 4 * BLOOM_WORDS == 4_096
    assert [Filter("exact", vocab).words for vocab in (32, 33, 49_152)] == [1, 2, 1_536]
    with pytest.raises(ShapeError, match="penalty_filter"):
        Filter("counting", 5)


def test_no_two_tokens_have_the_same_bits_and_each_has_four():
    places = np.sort(Filter("bloom", 262_144).places(np.arange(262_144)), axis=1)
    assert (np.diff(places, axis=1) > 0).all()
    assert len(np.unique(places, axis=0)) == len(places)


def textbook(n: int, vocab: int) -> float:
    """(1 - (1 - 1/m)^(k n))^k of the tokens that were not seen."""
    return (vocab - n) * (1 - (1 - 1 / (32 * BLOOM_WORDS)) ** (4 * n)) ** 4


@pytest.mark.parametrize("skewed", [False, True], ids=["uniform", "by Zipf's law"])
@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize("n", [1_000, 2_000, 4_000])
def test_false_positives_are_as_many_as_the_textbook_says(n, vocab, skewed):
    rng, form, weights = np.random.default_rng(n), Filter("bloom", vocab), 1 / (np.arange(vocab) + 10.0)
    counts = []
    for _ in range(30):
        ids = rng.choice(vocab, n, replace=False, p=weights / weights.sum() if skewed else None)
        found = np.unpackbits(form.bitmaps(built(form, ids)[None]).view(np.uint8)).sum()
        counts.append(int(found) - n)
        assert counts[-1] >= 0
    error = np.sqrt(textbook(n, vocab) / len(counts))  # of a mean of counts that are nearly Poisson's
    assert abs(np.mean(counts) - textbook(n, vocab)) < 0.15 * textbook(n, vocab) + 4 * error, np.mean(counts)
