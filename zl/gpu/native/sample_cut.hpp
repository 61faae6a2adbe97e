// The search for top-p's cut in a list of candidates, and the draw from a list; no sort of more than a few tokens.
// In an anonymous namespace, as sample_lanes.hpp is and for the same reason.
#pragma once
#include <math.h>

#include "sample_lanes.hpp"

namespace {

constexpr int kChunk = 256;    // candidates that share one partial sum of the draw
constexpr int kEdges = 8;      // of one turn of the threshold search
constexpr int kSmall = 32;     // up to here a list is sorted by insertion

// A list of tokens in id order. Arrays have room for one vector past the end.
struct List {
    float* w;
    float* d;
    int32_t* id;
    int n;
};

// Top-p keeps what is more likely than d, and of the tokens at d those with an id up to `id`.
struct Cut {
    float d;
    int32_t id;
};

inline void add_to(List& list, Mask m, V w, V d, Ids id) {
    list.n += append(m, w, d, id, list.w + list.n, list.d + list.n, list.id + list.n);
}

inline void pad(List& list) {  // to whole groups of four vectors, with tokens that have no weight
    for (int i = list.n; i < (list.n + 63) / 64 * 64; i++) list.w[i] = 0, list.d[i] = kMasked, list.id[i] = INT32_MAX;
}

double mass_of(const List& list) {
    Sum sum;
    for (int i = 0; i < list.n; i += 64)
        accumulate(sum, add(add(load(list.w + i), load(list.w + i + 16)), add(load(list.w + i + 32), load(list.w + i + 48))));
    return total(sum);
}

// The mass at or below each edge.
void masses_below(const List& list, const float* edge, double* mass) {
    Sum sum[kEdges];
    for (int i = 0; i < list.n; i += 64) {
        V w[4], d[4];
        for (int v = 0; v < 4; v++) w[v] = load(list.w + i + 16 * v), d[v] = load(list.d + i + 16 * v);
        for (int k = 0; k < kEdges; k++) {
            V e = set1(edge[k]);
            accumulate(sum[k], add(add(keep(~greater(d[0], e), w[0]), keep(~greater(d[1], e), w[1])),
                                   add(keep(~greater(d[2], e), w[2]), keep(~greater(d[3], e), w[3]))));
        }
    }
    for (int k = 0; k < kEdges; k++) mass[k] = total(sum[k]);
}

// Sorts a short list by falling likelihood, then rising id.
void sort_small(List& list) {
    for (int i = 1; i < list.n; i++) {
        float w = list.w[i], d = list.d[i];
        int32_t id = list.id[i];
        int j = i;  // ids rise, so equals stay where they are
        for (; j && list.d[j - 1] < d; j--) list.w[j] = list.w[j - 1], list.d[j] = list.d[j - 1], list.id[j] = list.id[j - 1];
        list.w[j] = w, list.d[j] = d, list.id[j] = id;
    }
}

// Puts into `to`, which may be `from` itself (it never gets past what was read), the tokens above `bottom` and not above
// `high`; returns the lowest of them.
float between(const List& from, float bottom, float high, List& to) {
    const List in = from;  // copies: the compiler cannot know that appending leaves the lists' pointers alone
    List out = to;
    out.n = 0;
    V fall = set1(0);
    for (int i = 0; i < in.n; i += 16) {
        const V d = load(in.d + i), w = load(in.w + i);
        const Ids id = load_ids(in.id + i);
        const Mask m = greater(d, set1(bottom)) & ~greater(d, set1(high));
        fall = max(fall, keep(m, sub(set1(0), d)));
        add_to(out, m, w, d, id);
    }
    to.n = out.n;
    return -highest(fall);
}

// Finds how much of the unlikely end can be left out: at most `spare` of mass, `below` of it being outside
// the list. The mass left out is what is summed, because there the weights' rounding is far below one token; in the mass
// kept, the likeliest tokens' rounding would outweigh many unlikely ones.
// Each turn goes on with the tokens between two edges. The list's d are in [low, high]; the last edge is low itself, which
// no turn but the one that ends with it can keep, so the list shrinks every time. `part` is the search's own list.
// False: too much is outside the list already.
bool find_cut(const List& all, float low, double below, double spare, List& part, Cut* cut) {
    if (below > spare || !all.n) return false;
    const List* list = &all;
    float high = 0;
    while (list->n > kSmall && low < high) {
        float edge[kEdges];
        double mass[kEdges];
        for (int k = 0; k < kEdges; k++) {
            // At first the cut is near the low end, which is where the list was made to end.
            const double up = (double)(kEdges - 1 - k) / kEdges, share = list == &all ? up * up : up;
            float e = (float)(low + ((double)high - low) * share);
            e = e < high ? e : nextafterf(high, kMasked);
            edge[k] = k < kEdges - 1 && e > low ? e : low;
        }
        masses_below(*list, edge, mass);
        int k = 0;
        while (k < kEdges && below + mass[k] > spare) k++;
        const float bottom = k < kEdges ? edge[k] : kMasked;
        high = k ? edge[k - 1] : high;
        below += k < kEdges ? mass[k] : 0;
        const float lowest = between(*list, bottom, high, part);
        if (!part.n) {  // rounding between two turns: all that is above stays
            *cut = {high, INT32_MAX};
            return true;
        }
        pad(part);
        low = lowest;
        list = &part;
    }
    if (list == &all) {
        part.n = all.n;
        for (int i = 0; i < all.n; i++) part.w[i] = all.w[i], part.d[i] = all.d[i], part.id[i] = all.id[i];
    }
    if (part.n <= kSmall) sort_small(part);  // a longer list has equals only, in order already
    int n = part.n;
    while (n > 1 && below + part.w[n - 1] <= spare) below += part.w[--n];
    *cut = {part.d[n - 1], part.id[n - 1]};
    return true;
}

inline V kept_weights(const List& list, int i, const Cut* cut) {
    V w = load(list.w + i);
    if (!cut) return w;
    V d = load(list.d + i), edge = set1(cut->d);
    return keep(greater(d, edge) | (equal(d, edge) & up_to(list.id + i, cut->id)), w);
}

// The draw: inverse CDF over the kept tokens in id order. The list is padded with zero weights to whole groups of four
// vectors. Returns the place in the list: of the entry at which the sum exceeds u times the kept mass, else of the last.
// `left` is what of the draw is left for that entry.
int pick(const List& list, const Cut* cut, float u, double* sums, double* left) {
    const int n_chunks = (list.n + kChunk - 1) / kChunk;
    double mass = 0;
    for (int c = 0; c < n_chunks; c++) {
        const int end = c * kChunk + kChunk < list.n ? c * kChunk + kChunk : list.n;
        Sum sum;
        for (int i = c * kChunk; i < end; i += 64)
            accumulate(sum, add(add(kept_weights(list, i, cut), kept_weights(list, i + 16, cut)),
                                add(kept_weights(list, i + 32, cut), kept_weights(list, i + 48, cut))));
        mass += sums[c] = total(sum);
    }
    const double draw = u * mass;  // below the mass, since u < 1: some chunk crosses
    double below = 0;
    int c = 0, last = 0;
    while (c < n_chunks - 1 && below + sums[c] <= draw) below += sums[c++];
    for (int i = c * kChunk; i < list.n && i < (c + 1) * kChunk; i += 16) {
        float w[16];
        store(w, kept_weights(list, i, cut));
        for (int j = 0; j < 16; j++) {
            *left = draw - below;
            if (w[j] > 0) last = i + j;
            if ((below += w[j]) > draw) return i + j;
        }
    }
    *left = HUGE_VAL;
    return last;
}

}  // namespace
