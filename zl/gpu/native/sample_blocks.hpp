// What the sampler keeps of each block of 32 logits: its maximum, and the sum of its weights relative to that maximum.
// Made where the logits are made, while they are in registers, two rows at a time; the blocks come in any order, and
// sample.cpp adds them in a fixed one. (Online softmax: Milakov and Gimelshein, arXiv:1805.02867.)
// In an anonymous namespace, as sample_lanes.hpp is and for the same reason.
#pragma once
#include "sample.hpp"
#include "sample_lanes.hpp"

namespace {

constexpr int kBlock = 32;
constexpr float kLog2eFloat = 0x1.715476p+0f;

// 2^f on [-0.5, 0.5]: fitted at Chebyshev nodes with p(0) = 1, relative error below 9e-9.
constexpr float kP6 = 0x1.444004p-13f, kP5 = 0x1.5f0896p-10f, kP4 = 0x1.3b2a1cp-7f, kP3 = 0x1.c6af6cp-5f,
                kP2 = 0x1.ebfbe0p-3f, kP1 = 0x1.62e430p-1f;

// p(f) * 2^n; n comes with kShift added too.
inline V power(V f, V n, V shifted) {
    V p = fma(set1(kP6), f, set1(kP5));
    p = fma(p, f, set1(kP4));
    p = fma(p, f, set1(kP3));
    p = fma(p, f, set1(kP2));
    p = fma(p, f, set1(kP1));
    p = fma(p, f, set1(1.0f));
    return scale(p, n, shifted);
}

// 2^(d * k), d being a distance within one block: what rounding k and the product costs grows with |d|, while the weight
// falls faster, so the block's sum is right to its last bits.
inline V near_weight(V d, V k) {
    V shifted = fma(d, k, set1(kShift));
    V n = sub(shifted, set1(kShift));
    return power(fms(d, k, n), n, shifted);
}

struct Block {
    V lo, hi;  // a block's 32 logits
};
inline Block block_at(const float* x) { return {load(x), load(x + 16)}; }
// The first n of them; the others are no tokens.
inline Block only(int n, const Block& h) {
    const Mask m = n < 32 ? (1u << n) - 1 : ~0u;
    return {choose(m & 0xffff, h.lo, set1(kMasked)), choose(m >> 16, h.hi, set1(kMasked))};
}

// The maxima of two rows' blocks, in all lanes; +inf where the block has a NaN or +inf.
inline void tops_of(const Block& a, const Block& b, V* top_a, V* top_b) {
    const V none = set1(__builtin_inff());
    highest_of(choose(unordered(a.lo, a.hi), none, max(a.lo, a.hi)), choose(unordered(b.lo, b.hi), none, max(b.lo, b.hi)),
               top_a, top_b);
}

inline void near_sums_of(const Block& a, const Block& b, V top_a, V top_b, float k_a, float k_b, float* sum_a, float* sum_b) {
    const V ka = set1(k_a), kb = set1(k_b);
    sums_of(add(near_weight(sub(a.lo, top_a), ka), near_weight(sub(a.hi, top_a), ka)),
            add(near_weight(sub(b.lo, top_b), kb), near_weight(sub(b.hi, top_b), kb)), sum_a, sum_b);
}

// Block nb of two rows (which may be one row twice).
inline void measure(const Block& a, const Block& b, const zl_sample_stats& to_a, const zl_sample_stats& to_b, int nb) {
    V top_a, top_b;
    tops_of(a, b, &top_a, &top_b);
    to_a.top[nb] = first(top_a), to_b.top[nb] = first(top_b);
    if (to_a.k != 0 || to_b.k != 0)
        near_sums_of(a, b, top_a, top_b, to_a.k, to_b.k, to_a.sum + nb, to_b.sum + nb);
    if (to_a.want_raw | to_b.want_raw)
        near_sums_of(a, b, top_a, top_b, kLog2eFloat, kLog2eFloat, to_a.raw + nb, to_b.raw + nb);
}

}  // namespace
