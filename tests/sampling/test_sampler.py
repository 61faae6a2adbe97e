"""zl/sampling/sampler.py and zl/gpu/native/sample.cpp: one contract, every test on each of them."""

import itertools

import numpy as np
import pytest
import torch

from tests.sampling import oracle
from tests.sampling.native import NativeSampler, bitmap
from zl.errors import ShapeError
from zl.sampling import profiles, sampler
from zl.sampling.filter import KINDS

NUMERIC = 4
VOCABULARIES = [1, 2, 15, 31, 32, 33, 511, 512, 513, 3000]


def rows(seed, vocab, n):
    """Random rows of several kinds: peaked, flat, tied, with masked tokens."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        kind = i % 5
        x = oracle.zipf_logits(rng, vocab) if kind < 2 else rng.normal(0, (0.05, 3, 9)[kind - 2], vocab)
        if i % 3 == 2:
            x = np.round(x * 4) / 4  # ties
        if i % 7 == 3 and vocab > 2:
            x[rng.random(vocab) < 0.3] = -np.inf
            x[rng.integers(vocab)] = 1.0
        yield rng, x.astype(np.float32)


# ---- distribution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", profiles.PROFILES.values(), ids=lambda p: p.name)
def test_draws_follow_the_exact_distribution(make_sampler, profile):
    vocab = 700
    s = make_sampler(vocab)
    rng = np.random.default_rng(11)
    logits = oracle.zipf_logits(rng, vocab, slope=1.2, noise=0.3)
    ids = rng.choice(vocab, 100, replace=False)
    settings = {"temperature": profile.temperature, "top_p": profile.top_p, "penalty": profile.penalty}
    n = 4_000 if s.level == "torch" else 30_000
    words = s.seen(ids)
    tokens = [s.row(logits, seen=words, seed=i // 50, index=i % 50, logprob=False, **settings)[0] for i in range(n)]
    x = oracle.penalised(logits, ids, profile.penalty)
    assert oracle.chi_square(tokens, oracle.distribution(x, profile.temperature, profile.top_p)) > 1e-6
    # The same test sees a temperature that is off by a fifth.
    wrong = oracle.distribution(x, profile.temperature * 1.2, 1.0)
    assert oracle.chi_square(tokens, wrong) < 1e-6


def test_full_distribution_is_drawn_without_top_p(make_sampler):
    s = make_sampler(40)
    logits = np.random.default_rng(3).normal(0, 1.5, 40).astype(np.float32)
    tokens = [s.row(logits, seed=i, logprob=False)[0] for i in range(20_000 if s.level != "torch" else 5_000)]
    assert oracle.chi_square(tokens, oracle.distribution(logits, 1.0, 1.0)) > 1e-6


# ---- membership ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_top_p_keeps_what_a_float64_sort_keeps(make_sampler, vocab):
    s = make_sampler(vocab)
    equal = total = 0
    for rng, x in rows(vocab, vocab, 60):
        temperature = float(rng.choice([0.3, 0.7, 0.9, 1.5]))
        top_p = float(rng.choice([0.05, 0.5, 0.95, 0.99, 0.99999]))
        got, wanted = s.kept(x, temperature=temperature, top_p=top_p), oracle.kept(x, temperature, top_p)
        assert (got != wanted).sum() <= 1, (temperature, top_p, got.sum(), wanted.sum())
        equal += int((got == wanted).all())
        total += 1
    assert equal >= 0.95 * total


@pytest.mark.parametrize("kind", ["zipf", "flat", "equal", "two_levels"])
def test_top_p_is_exact_to_one_token_at_a_real_vocabulary(make_sampler, kind):
    vocab = 49_152
    s = make_sampler(vocab)
    rng = np.random.default_rng(5)
    x = {
        "zipf": lambda: oracle.zipf_logits(rng, vocab),
        "flat": lambda: rng.normal(0, 1, vocab).astype(np.float32),
        "equal": lambda: np.full(vocab, 2.5, np.float32),
        "two_levels": lambda: np.where(rng.random(vocab) < 0.5, 3.0, 2.999).astype(np.float32),
    }[kind]()
    for top_p in (0.5, 0.95, 0.99):
        got, wanted = s.kept(x, temperature=0.9, top_p=top_p), oracle.kept(x, 0.9, top_p)
        assert (got != wanted).sum() <= 1, (top_p, got.sum(), wanted.sum())


def test_ties_at_the_edge_go_to_the_lowest_ids(make_sampler):
    s = make_sampler(8)
    x = np.array([0, 1, 0, 1, 1, 1, 0, 0], np.float32)
    assert s.kept(x * 50, top_p=0.5).nonzero()[0].tolist() == [1, 3]
    assert s.kept(x * 50, top_p=0.51).nonzero()[0].tolist() == [1, 3, 4]


def test_every_draw_is_a_kept_token(make_sampler):
    s = make_sampler(600)
    for i, (rng, x) in enumerate(rows(8, 600, 150)):
        settings = {"temperature": float(rng.choice([0.3, 1.0])), "top_p": float(rng.choice([0.3, 0.9, 1.0]))}
        token, _, flags = s.row(x, seed=i, **settings)
        assert flags == 0
        assert s.kept(x, **settings)[token]
        assert np.isfinite(x[token])


# ---- penalty ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [5, 33, 513, 1000, 20_000])
def test_penalty_equals_a_plain_set(make_sampler, vocab, kind):
    """The set is what was seen; with a Bloom filter, and the tokens that it takes for seen."""
    s, n_false = make_sampler(vocab), 0
    for i, (rng, x) in enumerate(rows(vocab + 1, vocab, 40 if vocab < 20_000 else 8)):
        ids, later = rng.integers(0, vocab, rng.integers(0, min(2 * vocab, 9_000))), rng.integers(0, vocab, 2)
        penalty = float(rng.choice([1.1, 1.2, 0.8, 3.0]))
        seen = oracle.taken_for_seen([*ids, *later], vocab, kind)
        n_false += len(seen) - len({*ids.tolist(), *later.tolist()})
        y = oracle.penalised(x, seen, penalty)
        settings = {"temperature": 0.8, "top_p": 0.9, "seed": i}
        words = s.seen(ids, later, kind)
        # Handing in the penalised logits without a penalty must be the same row, bit for bit.
        assert s.row(x, seen=words, penalty=penalty, **settings)[0] == s.row(y, **settings)[0]
        assert s.row(x, seen=words, penalty=penalty)[0] == s.row(y)[0]
        greedy = s.row(x, seen=words, penalty=penalty, temperature=0.0)[0]
        assert greedy == int(np.argmax(y))
    assert (n_false > 0) == (kind == "bloom" and vocab == 20_000)


# ---- log probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 513, 49_152])
def test_logprob_is_the_raw_models(make_sampler, vocab):
    s = make_sampler(vocab)
    for i, (rng, x) in enumerate(rows(21, vocab, 12)):
        words = s.seen(rng.integers(0, vocab, 20))
        temperature = float(rng.choice([0.0, 0.7]))
        token, logprob, _ = s.row(x, seen=words, temperature=temperature, top_p=0.9, penalty=1.3, seed=i)
        wanted = torch.log_softmax(torch.from_numpy(x).double(), 0)[token]
        assert abs(logprob - float(wanted)) < 1e-5


# ---- degenerate rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("place", [0, 15, 16, 511, 512, 699])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_draws_nothing(make_sampler, value, place, temperature):
    x = np.random.default_rng(1).normal(0, 1, 700).astype(np.float32)
    x[place] = value
    s = make_sampler(700)
    assert s.row(x, temperature=temperature, top_p=0.9) == (-1, 0.0, NUMERIC)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.9}, {}], ids=["greedy", "top_p", "full"])
def test_a_row_masked_throughout_draws_nothing(make_sampler, settings):
    for vocab in (3, 512, 600):
        s = make_sampler(vocab)
        assert s.row(np.full(vocab, -np.inf, np.float32), **settings) == (-1, 0.0, NUMERIC)


@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.7, 4294.0])
def test_one_finite_token_is_always_drawn(make_sampler, temperature, top_p):
    s = make_sampler(600)
    for place in (0, 17, 599):
        x = np.full(600, -np.inf, np.float32)
        x[place] = -3.0
        assert s.row(x, temperature=temperature, top_p=top_p, seed=9) == (place, 0.0, 0)


@pytest.mark.parametrize("settings", [{"top_p": 0.0}, {"top_p": 1e-6}, {"temperature": 1e-6}, {"temperature": 0.0}])
def test_limits_of_the_settings_are_greedy(make_sampler, settings):
    s = make_sampler(900)
    for i, (_, x) in enumerate(rows(31, 900, 25)):
        x[int(x.argmax())] += 0.01  # alone at the top: draws among equals are not greedy
        assert s.row(x, seed=i, **settings)[0] == int(x.argmax())


def test_greedy_takes_the_lowest_id_among_equals(make_sampler):
    s = make_sampler(1100)
    for places in ([1099, 40, 700], [513, 512], [15, 16]):
        x = np.zeros(1100, np.float32)
        x[places] = 5
        assert s.row(x, temperature=0.0)[0] == min(places)
        assert s.row(x, top_p=0.0, seed=4)[0] == min(places)
    assert s.row(np.zeros(1100, np.float32), temperature=0.0)[0] == 0


def test_all_equal_logits_give_every_token(make_sampler):
    s = make_sampler(10)
    drawn = {s.row(np.full(10, -7, np.float32), seed=i)[0] for i in range(400)}
    assert drawn == set(range(10))


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_huge_and_tiny_logits_are_no_error(make_sampler, top_p):
    s = make_sampler(600)
    top = float(np.finfo(np.float32).max)
    x = np.full(600, -top, np.float32)
    x[300] = top
    assert s.row(x, temperature=0.7, top_p=top_p, seed=5)[::2] == (300, 0)
    x = np.linspace(1e-42, 5e-42, 600).astype(np.float32)  # denormal: all as likely as makes no difference
    assert s.row(x, temperature=0.7, top_p=top_p, seed=5)[2] == 0
    # A penalty below one overflows the only large logit: no number to go on with.
    x = np.full(600, 1.0, np.float32)
    x[5] = top
    assert s.row(x, seen=s.seen([5]), penalty=0.5, top_p=top_p)[::2] == (-1, NUMERIC)


def test_tokens_of_no_weight_are_never_drawn(make_sampler):
    s = make_sampler(600)
    x = np.full(600, -1000.0, np.float32)  # exp underflows to zero
    x[[3, 590]] = 0
    assert {s.row(x, seed=i)[0] for i in range(200)} == {3, 590}


# ---- independence ----------------------------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_index_only(make_sampler):
    s, fresh = make_sampler(800), make_sampler(800)
    made = list(rows(41, 800, 30))
    settings = {"temperature": 0.9, "top_p": 0.95}
    first = [s.row(x, seed=7, index=i, **settings) for i, (_, x) in enumerate(made)]
    for i in reversed(range(len(made))):  # after other rows, in another order, with another scratch
        assert fresh.row(made[i][1], seed=7, index=i, **settings) == first[i]
    x = np.zeros(800, np.float32)
    draws = {(seed, index): s.row(x, seed=seed, index=index)[0] for seed in (1, 2, 2**32 + 1) for index in range(40)}
    assert len(set(draws.values())) > 90
    assert draws == {key: s.row(x, seed=key[0], index=key[1])[0] for key in draws}


def test_torch_rows_are_bitwise_alone_as_in_a_batch():
    vocab, n = 2_100, 24
    made = [(rng, x) for rng, x in rows(51, vocab, n)]
    logits = torch.from_numpy(np.stack([x for _, x in made]))
    logits[5, 7] = float("nan")  # a bad neighbour touches nobody
    rng = np.random.default_rng(52)
    seen = torch.from_numpy(rng.random((n, vocab)) < 0.2)
    columns = [torch.from_numpy(rng.uniform(a, b, n).astype(np.float32)) for a, b in ((0, 1.2), (0.3, 1), (1, 1.3))]
    seeds, index = [int(v) for v in rng.integers(0, 2**63, n)], torch.arange(n)
    whole = sampler.sample(logits, seen, *columns, seeds, index)
    assert whole[2].tolist() == [i != 5 for i in range(n)]
    threads = torch.get_num_threads()
    try:
        for used in (1, 2):
            torch.set_num_threads(used)
            for i in range(n):
                one = slice(i, i + 1)
                alone = sampler.sample(logits[one], seen[one], *(c[one] for c in columns), seeds[one], index[one])
                assert [t.tolist() for t in alone] == [t[one].tolist() for t in whole]
    finally:
        torch.set_num_threads(threads)


def test_native_and_torch_draw_the_same_tokens(native_levels, native):
    vocab, n = 2_000, 2_500
    made = list(rows(61, vocab, n))
    rng = np.random.default_rng(62)
    seen = rng.random((n, vocab)) < 0.1
    choices = {"temperature": [0, 0.3, 0.7, 0.9], "top_p": [0.5, 0.95, 0.99, 1], "penalty": [1, 1.1]}
    columns = {name: rng.choice(values, n).astype(np.float32) for name, values in choices.items()}
    logits = np.stack([x for _, x in made])
    token, logprob, finite = sampler.sample(
        torch.from_numpy(logits), torch.from_numpy(seen), **{k: torch.from_numpy(v) for k, v in columns.items()},
        seed=list(range(n)), index=torch.arange(n),
    )  # fmt: skip
    assert finite.all()
    results = {}
    for level in native_levels:
        s = native(level, vocab)
        results[level] = [
            s.row(logits[i], seen=bitmap(seen[i]), seed=i, index=i, **{k: v[i] for k, v in columns.items()})
            for i in range(n)
        ]
        same = [results[level][i][0] == int(token[i]) for i in range(n)]
        print(f"{level}: {sum(same)} of {n} tokens as torch's")
        assert sum(same) >= 0.999 * n
        assert max(abs(results[level][i][1] - float(logprob[i])) for i in range(n) if same[i]) < 1e-5
    if {"avx512", "avx2"} <= results.keys():
        assert results["avx512"] == results["avx2"], "levels with fused multiply-add agree to the last bit"


# ---- profiles as constants -------------------------------------------------------------------------------------------


def test_each_profile_has_a_program_and_other_values_the_generic_one(native_levels, native):
    f32 = np.float32
    for level in native_levels:
        s = native(level, 8)
        for request_type, profile in profiles.PROFILES.items():
            values = (profile.temperature, profile.top_p, profile.penalty)
            asked = profiles.resolve(request_type)
            assert s.program(*values) == profiles.program_of(asked) < profiles.GENERIC
            for i in range(3):
                other = [float(np.nextafter(f32(v), f32(2))) if j == i else v for j, v in enumerate(values)]
                assert s.program(*other) == profiles.GENERIC == profiles.program_of(profiles.resolve(0, *other))


def test_a_profiles_program_gives_the_generic_ones_bits(native_levels, generic_levels, native):
    for level, vocab in itertools.product(native_levels, (33, 2_000, 5_003)):
        baked, generic = native(level, vocab), NativeSampler(level, generic_levels[level], vocab)
        try:
            for profile in profiles.PROFILES.values():
                settings = {"temperature": profile.temperature, "top_p": profile.top_p, "penalty": profile.penalty}
                assert generic.program(*settings.values()) == 0, "built without a profile"
                for i, (rng, x) in enumerate(rows(vocab, vocab, 120)):
                    words = baked.seen(rng.integers(0, vocab, 40))
                    one = baked.row(x, seen=words, seed=i, index=3, **settings)
                    assert one == generic.row(x, seen=words, seed=i, index=3, **settings)
                    kept = baked.kept(x, seen=words, **settings)
                    assert (kept == generic.kept(x, seen=words, **settings)).all()
        finally:
            generic.close()


# ---- the torch launcher's contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["logits", "seen", "temperature", "top_p", "penalty", "index"])
def test_wrong_arguments_are_named(argument):
    good = {
        "logits": torch.zeros(2, 4), "seen": torch.zeros(2, 4, dtype=torch.bool), "temperature": torch.zeros(2),
        "top_p": torch.ones(2), "penalty": torch.ones(2), "index": torch.zeros(2, dtype=torch.int64),
    }  # fmt: skip
    bad = good | {argument: torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(ShapeError) as caught:
        sampler.sample(**bad, seed=[0, 0])
    assert caught.value.argument == argument
