// Top-p of one row: which blocks may hold a candidate, the list of candidates, and where top-p cuts it.
// In an anonymous namespace, as sample_lanes.hpp is and for the same reason.
#pragma once
#include "sample_cut.hpp"
#include "sample_row.hpp"

namespace {

// What the search works with; its arrays are the scratch's.
struct Nucleus {
    int vocab;
    Exponent e;
    List all, part;
    List blocks;  // w: every block's mass; id: those of interest
    Cut cut;
};

// Every block's mass. The sum of them, in floats, is good enough to choose by.
float weigh_blocks(const Row& row, const zl_sample_stats& stats, Nucleus* s) {
    List& blocks = s->blocks;
    V sum = set1(0);
    blocks.n = (row.n_blocks + 63) / 64 * 64;
    for (int b = 0; b < blocks.n; b += 16) {
        const V w = mul(weight(sub(load(stats.top + b), set1(s->e.max)), s->e), load(stats.sum + b));
        store(blocks.w + b, w);
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
        const V d = sub(load(stats.top + b), set1(s->e.max)), w = load(s->blocks.w + b);
        for (int j = 0; j < kFloors; j++) {
            const Mask m = greater(d, set1(at.floor[j]));
            below[j] = add(below[j], keep(~m, w));
            n_above[j] += __builtin_popcount(m);
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
double list_above(const Row& row, const zl_sample_stats& stats, float floor, Nucleus* s) {
    const Exponent e = s->e;
    const V edge = set1(floor);
    int32_t* ids = s->blocks.id;
    List all = s->all;  // a copy: the compiler cannot know that appending leaves the list's pointers alone
    Sum below;
    int n = 0;
    for (int b = 0; b < row.n_blocks; b += 16) {
        Mask m = greater(sub(load(stats.top + b), set1(e.max)), edge);
        accumulate(below, keep(~m, load(s->blocks.w + b)));
        for (; m; m &= m - 1) {
            if (n < kAhead) row.request(b + __builtin_ctz(m));
            ids[n++] = b + __builtin_ctz(m);
        }
    }
    all.n = 0;
    for (int i = 0; i < n; i++) {
        const int b = ids[i];
        if (i + kAhead < n) row.request(ids[i + kAhead]);
        const Block h = row.penalised(b);
        const V d_lo = sub(h.lo, set1(e.max)), d_hi = sub(h.hi, set1(e.max));
        const V w_lo = weight(d_lo, e), w_hi = weight(d_hi, e);
        const Mask lo = greater(d_lo, edge), hi = greater(d_hi, edge);
        if (lo) add_to(all, lo, w_lo, d_lo, ids_from(b * kBlock));
        if (hi) add_to(all, hi, w_hi, d_hi, ids_from(b * kBlock + 16));
        accumulate(below, add(keep(~lo, w_lo), keep(~hi, w_hi)));
    }
    pad(all);
    s->all.n = all.n;
    return total(below);
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
