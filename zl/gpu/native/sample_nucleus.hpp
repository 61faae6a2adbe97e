// Top-p of one row: which blocks may hold a candidate, the list of candidates, and where top-p cuts it.
// In an anonymous namespace, as sample_lanes.hpp is and for the same reason.
#pragma once
#include "sample_cut.hpp"
#include "sample_row.hpp"

namespace {

// What the search works with; its arrays are the scratch's.
struct Nucleus {
    int vocab;
    float* mass;      // every block's, to a whole group of four vectors
    int32_t* blocks;  // those of interest, in order
    int32_t* before;  // how many candidates come before each
    List all, part;
    // Of the row at hand.
    Exponent e;
    float floor;  // candidates are above
    int n_blocks;
    Cut cut;
};

// Every block's mass. The sum of them, in floats, is good enough to choose by.
float weigh_blocks(const Row& row, const zl_sample_stats& stats, Nucleus* s) {
    V sum = set1(0);
    for (int b = 0; b < (row.n_blocks + 63) / 64 * 64; b += 16) {
        const V w = mul(weight(sub(load(stats.top + b), set1(s->e.max)), s->e), load(stats.sum + b));
        store(s->mass + b, w);
        sum = add(sum, w);
    }
    return sum_of(sum);
}

// The highest floor below which, going by the blocks that have nothing above it, there is less than `spare`.
int choose_floor(const Row& row, const zl_sample_stats& stats, const Settings& at, float spare, Nucleus* s) {
    V below[kFloors];
    int n_above[kFloors] = {};
    for (V& v : below) v = set1(0);
    for (int b = 0; b < row.n_blocks; b += 16) {
        const V d = sub(load(stats.top + b), set1(s->e.max)), w = load(s->mass + b);
        for (int j = 0; j < kFloors; j++) {
            below[j] = add(below[j], not_above(d, set1(at.floor[j]), w));
            n_above[j] += __builtin_popcount(greater(d, set1(at.floor[j])));
        }
    }
    int j = 0;
    for (; j < kFloors; j++) {
        // Blocks with something above have more below too: twice what the others have, where that is known.
        const int n_under = row.n_blocks - n_above[j];
        if (n_under && 2 * sum_of(below[j]) * row.n_blocks <= spare * n_under) break;
    }
    return j;
}

// Lists the tokens above max + floor and returns the mass of all others.
double list_above(const Row& whole, const zl_sample_stats& stats, float floor, Nucleus* s) {
    // Copies: the compiler cannot know that writing a list leaves them alone.
    const Row row = whole;
    const Exponent e = s->e;
    const V edge = set1(floor);
    int32_t *ids = s->blocks, *before = s->before;
    float *to_w = s->all.w, *to_d = s->all.d;
    Sum below;
    int n = 0, n_listed = 0;
    for (int b = 0; b < row.n_blocks; b += 16) {
        const V d = sub(load(stats.top + b), set1(e.max));
        accumulate(below, not_above(d, edge, load(s->mass + b)));
        for (Mask m = greater(d, edge); m; m &= m - 1) {
            if (n < kAhead) row.request(b + __builtin_ctz(m));
            ids[n++] = b + __builtin_ctz(m);
        }
    }
    for (int i = 0; i < n; i++) {
        const int b = ids[i];
        if (i + kAhead < n) row.request(ids[i + kAhead]);
        before[i] = n_listed;
        const Block h = row.penalised(b);
        const V d_lo = sub(h.lo, set1(e.max)), d_hi = sub(h.hi, set1(e.max));
        const V w_lo = weight(d_lo, e), w_hi = weight(d_hi, e);
        const Taken lo = taken(greater(d_lo, edge)), hi = taken(greater(d_hi, edge));
        pack(lo, w_lo, to_w + n_listed), pack(lo, d_lo, to_d + n_listed);
        n_listed += lo.n;
        pack(hi, w_hi, to_w + n_listed), pack(hi, d_hi, to_d + n_listed);
        n_listed += hi.n;
        accumulate(below, add(not_above(d_lo, edge, w_lo), not_above(d_hi, edge, w_hi)));
    }
    s->floor = floor, s->n_blocks = n, s->all.n = n_listed;
    pad(s->all);
    return total(below);
}

// Which of a block's 32 tokens are candidates.
inline Mask candidates(const Row& row, int b, const Nucleus& s) {
    const Block h = row.penalised(b);
    const V edge = set1(s.floor), max = set1(s.e.max);
    return greater(sub(h.lo, max), edge) | greater(sub(h.hi, max), edge) << 16;
}

// The id of the candidate at a place of the list.
int32_t id_of(const Row& row, const Nucleus& s, int place) {
    int i = 0;
    for (int end = s.n_blocks; end - i > 1;) {
        const int middle = (i + end) / 2;
        (s.before[middle] <= place ? i : end) = middle;
    }
    Mask m = candidates(row, s.blocks[i], s);
    for (int n = place - s.before[i]; n; n--) m &= m - 1;
    return s.blocks[i] * kBlock + __builtin_ctz(m);
}

// Finds top-p's cut in a list of candidates.
void keep_top(const Row& row, const zl_sample_stats& stats, const Settings& at, Nucleus* s) {
    const double mass = weigh_blocks(row, stats, s), sure = at.sure * mass / s->vocab;
    for (int j = choose_floor(row, stats, at, (float)(at.rest * mass), s);; j++) {
        const bool last = j >= kFloors || at.share[j] <= sure;
        const float floor = last ? (float)(at.temperature * ln(sure)) : at.floor[j];
        const double below = list_above(row, stats, floor, s);
        if (find_cut(s->all, floor, below, at.rest * (below + mass_of(s->all)), s->part, &s->cut)) return;
        if (last) break;
    }
    s->cut = {kMasked, INT32_MAX};  // out of reach: half of `rest` at most is below
}

}  // namespace
