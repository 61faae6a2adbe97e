"""Sampling on float32 logits: repetition penalty, temperature, top-p, one draw a row. Plain torch and Triton.

A row's result is a function of that row alone: rows are worked one by one, and every sum is a sequential cumulative sum
in float64, whose order depends on neither the number of rows nor the number of threads.

Likelihood is compared by d = x - max(x) in float32, x being the penalised logits; a token's weight is
2**(d * log2(e) / T), zero where that exponent rounds below -125. The native sampler (gpu/native/sample.cpp) keeps the
same rules. `sample` is the slow twin of both; `sample_triton` needs triton, and a GPU or triton's interpreter.

State: none. Refuses asyncio, rows and gpu.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zl.errors import ShapeError
from zl.sampling.rng import HAVE_TRITON, philox_uniform, seed_tensor, uniforms

if HAVE_TRITON:
    import triton
    import triton.language as tl

MIN_TEMPERATURE = 5e-7
"""Below it a row is greedy: half of the wire's smallest step."""

LOWEST_EXPONENT = -125.0


def check_arguments(
    logits: torch.Tensor,
    seen: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    penalty: torch.Tensor,
    index: torch.Tensor,
) -> None:
    """Raise ShapeError unless the arguments are as `sample` describes them."""
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ShapeError("logits", f"{logits.dtype} {tuple(logits.shape)}", "float32 [n, vocab]")
    n = logits.shape[0]
    if seen.shape != logits.shape or seen.dtype != torch.bool:
        raise ShapeError("seen", f"{seen.dtype} {tuple(seen.shape)}", f"bool {tuple(logits.shape)}")
    for name, column in (("temperature", temperature), ("top_p", top_p), ("penalty", penalty)):
        if column.shape != (n,) or column.dtype != torch.float32:
            raise ShapeError(name, f"{column.dtype} {tuple(column.shape)}", f"float32 [{n}]")
    if index.shape != (n,):
        raise ShapeError("index", tuple(index.shape), (n,))


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide a seen token's positive logit by the penalty and multiply any other logit of a seen token.

    logits float32 [n, vocab], seen bool [n, vocab], penalty float32 [n]; returns float32 [n, vocab]
    """
    p = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / p, logits * p), logits)


def weigh(x: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (d, w) of one row: float32 [vocab] distances from the maximum, float64 [vocab] weights, the largest 1."""
    d = x - x.max()
    exponent = d.double() * (math.log2(math.e) / temperature)
    w = torch.exp2(exponent)
    return d, torch.where(exponent.round() >= LOWEST_EXPONENT, w, torch.zeros_like(w))


def keep_top(d: torch.Tensor, w: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return bool [vocab]: the fewest likeliest tokens whose mass reaches top_p, the crossing one included.

    Ties go to the lowest id; at least one token is kept; from 1 on every token of non-zero weight is.
    """
    if top_p >= 1:
        return w > 0
    rest = 1 - max(top_p, 0.0)
    total = torch.cumsum(w, 0)[-1]
    # Lighter tokens have less than `rest` of the mass together: they cannot be kept, so they are not sorted.
    ids = torch.nonzero(w > rest * total / (2 * len(w))).flatten()
    order = ids[torch.sort(d[ids], descending=True, stable=True).indices]
    mass = torch.cumsum(w[order], 0)
    n = int((mass < max(top_p, 0.0) * total).sum()) + 1
    kept = torch.zeros_like(w, dtype=torch.bool)
    kept[order[:n]] = True
    return kept


def kept_tokens(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Return bool [vocab]: the tokens that one row (float32 [vocab], penalised) can draw."""
    if not temperature >= MIN_TEMPERATURE:
        return torch.arange(len(logits), device=logits.device) == _first(logits == logits.max())
    d, w = weigh(logits, temperature)
    return keep_top(d, w, top_p) & (w > 0)


def sample(
    logits: torch.Tensor,
    seen: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    penalty: torch.Tensor,
    seed: Sequence[int] | torch.Tensor,
    index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    logits   float32 [n, vocab]; -inf masks a token
    seen     bool [n, vocab]: tokens of the prompt and the answer so far
    temperature, top_p, penalty   float32 [n]; temperature 0 is greedy, the lowest id among equals
    seed     n integers, or 64-bit patterns in an int64 or uint64 tensor [n]
    index    integers [n]: the token's place in the answer
    Returns  token int64 [n], logprob float32 [n] (log-softmax of `logits` at the token), finite bool [n].
             A row with a NaN, a +inf or nothing but -inf has finite False, token -1, logprob 0
    Raises   ShapeError
    """
    check_arguments(logits, seen, temperature, top_p, penalty, index)
    n = logits.shape[0]
    draws = uniforms(seed_tensor(seed, logits.device), index.to(logits.device)).tolist()
    settings = zip(temperature.tolist(), top_p.tolist(), draws, strict=True)
    x = penalise(logits, seen, penalty)
    # A penalty below 1 can overflow what was finite, hence the look at both.
    highest = torch.finfo(torch.float32).max
    finite = (logits <= highest).all(1) & (x <= highest).all(1) & (x >= -highest).any(1)
    token = torch.full((n,), -1, dtype=torch.int64, device=logits.device)
    logprob = torch.zeros(n, dtype=torch.float32, device=logits.device)
    for i, (t, p, u) in enumerate(settings):
        if not finite[i]:
            continue
        token[i] = _draw(x[i], t, p, u)
        d, w = weigh(logits[i], 1.0)
        logprob[i] = d[token[i]].double() - torch.cumsum(w, 0)[-1].log()
    return token, logprob, finite


def _draw(x: torch.Tensor, temperature: float, top_p: float, u: float) -> torch.Tensor:
    if not temperature >= MIN_TEMPERATURE:
        return _first(x == x.max())
    d, w = weigh(x, temperature)
    mass = torch.cumsum(torch.where(keep_top(d, w, top_p), w, torch.zeros_like(w)), 0)
    # The first token whose cumulative mass exceeds the draw has mass of its own. Should none do so, it is the last
    # that has any: where the sum first reaches its end.
    over = mass > u * mass[-1]
    return _first(over if bool(over[-1]) else mass == mass[-1])


def _first(mask: torch.Tensor) -> torch.Tensor:
    # argmax and max do not promise the lowest index among equals
    return torch.nonzero(mask)[0, 0]


BLOCK = 512
"""Tokens that a Triton program works on at a time; fixed, since the order of its sums hangs on it."""

NUM_WARPS = 16
"""Warps of a program: with 8 the kernel spills 8 bytes a thread on sm_90, with 16 nothing (124 registers)."""


def sample_triton(
    logits: torch.Tensor,
    seen: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    penalty: torch.Tensor,
    seed: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    token: torch.Tensor,
    logprob: torch.Tensor,
    finite: torch.Tensor,
) -> None:
    """Draw one token a row, one program a row, without a sort.

    logits   float32 [n, vocab], contiguous
    seen     int32 [n, ceil(vocab / 32)], contiguous: the bitmap, bit id % 32 of word id / 32
    temperature, top_p, penalty   float32 [n]; seed int64 [n], 64-bit patterns; index int64 [n]
    weights  float32 [n, vocab], contiguous: scratch, written
    token    int64 [n], logprob float32 [n], finite bool [n]: written; as `sample` returns them
    Ready    after the current stream; safe to capture; the launch settings are constants
    Raises   ShapeError
    """
    n, vocab = logits.shape if logits.dim() == 2 else (-1, -1)
    wanted = {
        "logits": (logits, torch.float32, (n, vocab)),
        "seen": (seen, torch.int32, (n, -(-vocab // 32))),
        "temperature": (temperature, torch.float32, (n,)),
        "top_p": (top_p, torch.float32, (n,)),
        "penalty": (penalty, torch.float32, (n,)),
        "seed": (seed, torch.int64, (n,)),
        "index": (index, torch.int64, (n,)),
        "weights": (weights, torch.float32, (n, vocab)),
        "token": (token, torch.int64, (n,)),
        "logprob": (logprob, torch.float32, (n,)),
        "finite": (finite, torch.bool, (n,)),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            layout = "" if tensor.is_contiguous() else " with strides"
            raise ShapeError(name, f"{tensor.dtype} {tuple(tensor.shape)}{layout}", f"{dtype} {shape} contiguous")
    _sample_kernel[(n,)](
        logits, seen, temperature, top_p, penalty, seed, index, weights, token, logprob, finite,
        VOCAB=vocab, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip


if HAVE_TRITON:
    # Coefficients of 2**f on [-0.5, 0.5], as in sample.cpp: fitted at Chebyshev nodes, relative error below 9e-9.
    @triton.jit
    def _weight(d, scale):  # type: ignore[no-untyped-def]
        exponent = d.to(tl.float64) * scale
        n = tl.floor(exponent + 0.5)
        f = (exponent - n).to(tl.float32)
        p = f * 0.00015461448 + 0.0013390867
        p = p * f + 0.009618057
        p = p * f + 0.05550357
        p = p * f + 0.2402265
        p = p * f + 0.6931472
        p = p * f + 1.0
        alive = n >= -125
        power = ((tl.where(alive, n, 0.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        return tl.where(alive, p * power, 0.0)

    @triton.jit
    def _penalised(row, words, ids, penalty, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        inside = ids < VOCAB
        x = tl.load(row + ids, mask=inside, other=float("-inf"))
        seen = (tl.load(words + ids // 32, mask=inside, other=0) >> (ids % 32)) & 1
        return x, tl.where(seen != 0, tl.where(x > 0, tl.div_rn(x, penalty + tl.zeros_like(x)), x * penalty), x)

    @triton.jit
    def _key(x, highest):  # type: ignore[no-untyped-def]
        # The bits of a float that is not negative rise with it: key 0 is the likeliest token.
        return (highest - x).to(tl.int32, bitcast=True).to(tl.int64)

    @triton.jit
    def _sample_kernel(  # type: ignore[no-untyped-def]
        logits, seen, temperature, top_p, penalty, seed, index, weights, token, logprob, finite,
        VOCAB: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        i = tl.program_id(0).to(tl.int64)
        row = logits + i * VOCAB
        words = seen + i * ((VOCAB + 31) // 32)
        w_row = weights + i * VOCAB
        t = tl.load(temperature + i)
        p = tl.load(top_p + i)
        r = tl.load(penalty + i)
        lane = tl.arange(0, BLOCK)
        top: tl.constexpr = 3.4028234663852886e38

        # Maxima, and whether all is finite.
        raw_max = tl.full((), float("-inf"), tl.float32)
        x_max = tl.full((), float("-inf"), tl.float32)
        bad = tl.zeros((), tl.int32)
        for start in range(0, VOCAB, BLOCK):
            raw, x = _penalised(row, words, start + lane, r, VOCAB)
            bad += tl.sum(tl.where((raw <= top) & (x <= top), 0, 1))
            raw_max = tl.maximum(raw_max, tl.max(raw, 0))
            x_max = tl.maximum(x_max, tl.max(x, 0))
        good = (bad == 0) & (x_max >= -top)
        tl.store(finite + i, good)
        chosen = tl.full((), -1, tl.int32)
        lp = tl.zeros((), tl.float32)
        if good:
            greedy = not (t >= 5e-7)
            scale = 1.4426950408889634 / tl.where(greedy, 1.0, t).to(tl.float64)
            raw_mass = tl.zeros((), tl.float64)
            mass = tl.zeros((), tl.float64)
            first = tl.full((), VOCAB, tl.int32)
            for start in range(0, VOCAB, BLOCK):
                ids = start + lane
                raw, x = _penalised(row, words, ids, r, VOCAB)
                raw_mass += tl.sum(_weight(raw - raw_max, 1.4426950408889634).to(tl.float64), 0)
                w = _weight(x - x_max, scale)
                mass += tl.sum(w.to(tl.float64), 0)
                tl.store(w_row + ids, w, mask=ids < VOCAB)
                first = tl.minimum(first, tl.min(tl.where(x == x_max, ids, VOCAB), 0))
            tl.debug_barrier()
            chosen = first
            if not greedy:
                # The smallest key such that what lies beyond it may be left out: four bits a pass, sixteen edges.
                spare = (1.0 - tl.maximum(p, 0.0).to(tl.float64)) * mass
                way = tl.arange(0, 16).to(tl.int64)
                edge_key = tl.zeros((), tl.int64)
                beyond = tl.zeros((), tl.float64)
                if p < 1:
                    for step in range(8):
                        shift = 28 - 4 * step
                        edges = edge_key + ((way + 1) << shift) - 1
                        below = tl.zeros((16,), tl.float64)
                        for start in range(0, VOCAB, BLOCK):
                            ids = start + lane
                            raw, x = _penalised(row, words, ids, r, VOCAB)
                            w = tl.load(w_row + ids, mask=ids < VOCAB, other=0.0).to(tl.float64)
                            out = _key(x, x_max)[None, :] > edges[:, None]
                            below += tl.sum(tl.where(out, w[None, :], 0.0), 1)
                        place = tl.min(tl.where(below <= spare, way, 15), 0)
                        beyond = tl.sum(tl.where(way == place, below, 0.0), 0)
                        edge_key += place << shift
                else:
                    edge_key += 0x7FFFFFFF

                # Of the tokens at the edge the highest ids may be left out too, as far as the mass allows.
                ties = tl.zeros((), tl.int32)
                above = tl.zeros((), tl.float64)
                tie_w = tl.zeros((), tl.float32)
                for start in range(0, VOCAB, BLOCK):
                    ids = start + lane
                    raw, x = _penalised(row, words, ids, r, VOCAB)
                    key = _key(x, x_max)
                    w = tl.load(w_row + ids, mask=ids < VOCAB, other=0.0)
                    above += tl.sum(tl.where(key < edge_key, w, 0.0).to(tl.float64), 0)
                    at_edge = (key == edge_key) & (ids < VOCAB)
                    ties += tl.sum(at_edge.to(tl.int32), 0)
                    tie_w = tl.maximum(tie_w, tl.max(tl.where(at_edge, w, 0.0), 0))
                tie_mass = tie_w.to(tl.float64)
                dropped = tl.where(tie_w > 0, (spare - beyond) / tl.where(tie_w > 0, tie_mass, 1.0), 0.0)
                kept_ties = tl.maximum(ties - tl.minimum(tl.floor(dropped), VOCAB * 1.0).to(tl.int32), 1)
                kept_ties = tl.where(p < 1, kept_ties, ties)

                # Inverse CDF in id order.
                s = tl.load(seed + i)
                u = philox_uniform(s & 0xFFFFFFFF, (s >> 32) & 0xFFFFFFFF, tl.load(index + i))
                draw = u.to(tl.float64) * (above + kept_ties.to(tl.float64) * tie_mass)
                so_far = tl.zeros((), tl.float64)
                n_ties = tl.zeros((), tl.int32)
                hit = tl.full((), VOCAB, tl.int32)
                last = tl.zeros((), tl.int32)
                for start in range(0, VOCAB, BLOCK):
                    ids = start + lane
                    raw, x = _penalised(row, words, ids, r, VOCAB)
                    key = _key(x, x_max)
                    w = tl.load(w_row + ids, mask=ids < VOCAB, other=0.0)
                    at_edge = (key == edge_key) & (ids < VOCAB)
                    rank = n_ties + tl.cumsum(at_edge.to(tl.int32), 0)
                    kept = tl.where((key < edge_key) | (at_edge & (rank <= kept_ties)), w, 0.0).to(tl.float64)
                    cumulative = so_far + tl.cumsum(kept, 0)
                    # A scan's partial sums may waver by a rounding: only a token of its own weight can be hit.
                    hit = tl.minimum(hit, tl.min(tl.where((cumulative > draw) & (kept > 0), ids, VOCAB), 0))
                    last = tl.maximum(last, tl.max(tl.where(kept > 0, ids, 0), 0))
                    so_far += tl.sum(kept, 0)
                    n_ties += tl.sum(at_edge.to(tl.int32), 0)
                chosen = tl.where(hit < VOCAB, hit, last)
            lp = (tl.load(row + chosen).to(tl.float64) - raw_max.to(tl.float64) - tl.log(raw_mass)).to(tl.float32)
        tl.store(token + i, chosen.to(tl.int64))
        tl.store(logprob + i, lp)
