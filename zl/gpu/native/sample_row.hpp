// One row of logits as blocks: reading them with the penalty, their weights, and what is made of their measures.
// In an anonymous namespace, as sample_lanes.hpp is and for the same reason.
#pragma once
#include <math.h>

#include "sample_blocks.hpp"
#include "sample_settings.hpp"

namespace {

constexpr int kAhead = 24;  // blocks of a list that are requested in advance: logits come from the last cache

// A row as whole blocks: all but the last one in place, the last one padded with -inf where it is partial.
struct Row {
    const float* base;
    const float* tail;
    int n_whole, n_blocks;
    const uint32_t* seen;  // a word a block; null: no penalty
    float penalty;
    const float* block(int b) const { return b < n_whole ? base + (size_t)b * kBlock : tail; }
    void request(int b) const {
        __builtin_prefetch(base + (size_t)b * kBlock);
        __builtin_prefetch(base + (size_t)b * kBlock + 16);
    }
    Block raw(int b) const { return block_at(block(b)); }
    Block penalised(int b) const {
        Block h = raw(b);
        if (!seen || !seen[b]) return h;
        const V p = set1(penalty);
        if (seen[b] & 0xffff) h.lo = penalise(h.lo, seen[b] & 0xffff, p);
        if (seen[b] >> 16) h.hi = penalise(h.hi, seen[b] >> 16, p);
        return h;
    }
};

struct Exponent {
    float max, high, low;  // the scratch has no alignment for vectors
};

inline V weight(V d, const Exponent& e) {
    V shifted = fma(d, set1(e.high), set1(kShift));
    V n = sub(shifted, set1(kShift));
    return power(fma(d, set1(e.low), fms(d, set1(e.high), n)), n, shifted);
}

float highest_of(const float* top, int n_blocks) {
    V best = set1(kMasked);
    for (int b = 0; b < n_blocks; b += 16) best = max(best, load(top + b));
    return highest(best);
}

inline bool is_number(float max) { return max <= FLT_MAX && max >= -FLT_MAX; }

// The measures end at a whole group of four vectors, with blocks of no weight.
void pad(const zl_sample_stats& stats, int n_blocks) {
    for (int b = n_blocks; b < (n_blocks + 63) / 64 * 64; b++)
        stats.top[b] = kMasked, stats.sum[b] = 0, stats.raw[b] = 0;
}

// log of the sum of e^(x - max) over the raw row.
double log_mass(const zl_sample_stats& stats, int n_blocks, float max) {
    const float high = (float)kLog2e;
    const Exponent e = {max, high, (float)(kLog2e - high)};
    Sum sum;
    for (int b = 0; b < n_blocks; b += 16)
        accumulate(sum, mul(weight(sub(load(stats.top + b), set1(e.max)), e), load(stats.raw + b)));
    return log(total(sum));
}

void measure_all(const Row& row, const zl_sample_stats& stats) {
    for (int b = 0; b < row.n_blocks; b++) {
        const Block h = row.raw(b);
        measure(h, h, stats, stats, b);
    }
}

// Measures the blocks again that have a seen token.
void penalise_blocks(const Row& row, const zl_sample_stats& stats, int32_t* ids) {
    int n = 0, b = 0;
    auto append_bits = [&](Mask m, int first) {
        for (; m; m &= m - 1) ids[n++] = first + __builtin_ctz(m);
    };
    for (; b + 16 <= row.n_blocks; b += 16) append_bits(non_zero(row.seen + b), b);
    for (; b < row.n_blocks; b++) append_bits(row.seen[b] != 0, b);
    for (int i = 0; i < n && i < kAhead; i++) row.request(ids[i]);
    for (int i = 0; i < n; i += 2) {
        if (i + kAhead < n) row.request(ids[i + kAhead]);
        if (i + kAhead + 1 < n) row.request(ids[i + kAhead + 1]);
        const int one = ids[i], two = ids[i + 1 < n ? i + 1 : i];
        const Block a = row.penalised(one), c = row.penalised(two);
        V top_a, top_c;
        tops_of(a, c, &top_a, &top_c);
        stats.top[one] = first(top_a), stats.top[two] = first(top_c);
        if (stats.k != 0) near_sums_of(a, c, top_a, top_c, stats.k, stats.k, stats.sum + one, stats.sum + two);
    }
}

int32_t argmax(const Row& row, const float* top, float max) {
    int b = 0;
    while (top[b] != max) b++;
    const Block h = row.penalised(b);
    const Mask lo = equal(h.lo, set1(max)), hi = equal(h.hi, set1(max));
    return b * kBlock + __builtin_ctz(lo | hi << 16);
}

// The token within a block at which the sum exceeds `left`, else the last that has weight.
int32_t pick_within(const Row& row, int b, double left, const Exponent& e) {
    float w[kBlock];
    const Block h = row.penalised(b);
    store(w, weight(sub(h.lo, set1(e.max)), e));
    store(w + 16, weight(sub(h.hi, set1(e.max)), e));
    double below = 0;
    int last = 0;
    for (int i = 0; i < kBlock; i++) {
        if (w[i] > 0) last = i;
        if ((below += w[i]) > left) return b * kBlock + i;
    }
    return b * kBlock + last;
}

}  // namespace
