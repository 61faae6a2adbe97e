"""What sampling must give, by a float64 sort: independent of both implementations."""

from __future__ import annotations

import functools

import numpy as np
from scipy import stats


def penalised(logits, seen_ids, penalty):
    """Apply the repetition penalty with a plain set, float32 like the samplers."""
    x = logits.copy()
    for token in set(seen_ids):
        x[token] = x[token] / np.float32(penalty) if x[token] > 0 else x[token] * np.float32(penalty)
    return x


def taken_for_seen(ids, vocab, kind):
    """Give the tokens that a filter takes for seen, a set: of a Bloom filter with its false positives."""
    ids = {int(i) for i in ids}
    if kind == "exact":
        return ids
    bits = {bit for token in ids for bit in bloom_bits(token)}
    return {token for token in range(vocab) if all(bit in bits for bit in bloom_bits(token))}


@functools.cache
def bloom_bits(token):
    """Give a token's four bits of 32,768, in plain integers.

    A line of 512 bits by the upper six bits of a product, in it the word that is the token's among 512, in it the
    token's bit among 32, turned by the product's next five bits.
    """
    bits = []
    for factor in (0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xCC9E2D51):
        product = (token // 512 + 1) * factor % 2**32
        line, turn = product // 2**26, product // 2**21 % 32
        bits.append(512 * line + token % 512 // 32 * 32 + (token + turn) % 32)
    return bits


def kept(x, temperature, top_p):
    """Return bool [vocab]: the smallest likeliest set of the penalised logits x that reaches top_p, ties by id."""
    z = (x.astype(np.float64) - x.max()) / np.float32(temperature)
    p = np.exp(z) / np.exp(z).sum()
    order = np.lexsort((np.arange(len(p)), -p))
    n = int(np.searchsorted(np.cumsum(p[order]), np.float64(np.float32(top_p)))) + 1
    mask = np.zeros(len(p), bool)
    mask[order[:n]] = True
    return mask & (p > 0)


def distribution(x, temperature, top_p):
    """Return float64 [vocab]: the exact probabilities of a draw."""
    z = (x.astype(np.float64) - x.max()) / np.float32(temperature)
    p = np.where(kept(x, temperature, top_p), np.exp(z), 0)
    return p / p.sum()


def chi_square(tokens, probabilities):
    """Return the p-value of the tokens under the distribution, cells below five expected draws put together."""
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[probabilities == 0].sum() == 0, "a token of probability zero was drawn"
    big = expected >= 5
    e, c = expected[big], counts[big].astype(float)
    rest = expected[~big].sum()
    if rest > 0:
        e, c = np.append(e, rest), np.append(c, counts[~big].sum())
    return stats.chi2.sf(((c - e) ** 2 / e).sum(), len(e) - 1) if len(e) > 1 else 1.0


def zipf_logits(rng, vocab, slope=2.0, noise=0.5):
    """Logits with the falling tail of a language model, float32 [vocab], in random id order."""
    x = 12 - slope * np.log(np.arange(1, vocab + 1)) + rng.normal(0, noise, vocab)
    return rng.permutation(x).astype(np.float32)
