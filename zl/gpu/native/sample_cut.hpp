// The search for top-p's cut in a list of candidates, and the draw from a list; no sort of more than a few tokens.
// In an anonymous namespace, as sample_lanes.hpp is and for the same reason.
#pragma once
#include <math.h>

#include "sample_lanes.hpp"

namespace {

constexpr int kChunk = 256;    // candidates that share one partial sum of the draw
constexpr int kEdges = 8;      // of one turn of the threshold search
constexpr int kSmall = 32;     // up to here a list is sorted by insertion

// A list of candidates in id order. Arrays have room for one vector past the end. Candidates are known by their places in
// the whole list, which are in the order of ids: an id is made out for the one that is drawn only.
struct List {
    float* w;
    float* d;
    int32_t* place;  // null: the whole list, whose places are 0, 1, 2 ...
    int n;
};

// Top-p keeps what is more likely than d, and of the tokens at d those with a place up to `place`.
struct Cut {
    float d;
    int32_t place;
};

inline void pad(const List& list) {  // to whole groups of four vectors, with tokens that have no weight
    for (int i = list.n; i < (list.n + 63) / 64 * 64; i++) list.w[i] = 0, list.d[i] = kMasked;
}

double mass_of(const List& list) {
    Sum sum;
    for (int i = 0; i < list.n; i += 64)
        accumulate(sum, add(add(load(list.w + i), load(list.w + i + 16)), add(load(list.w + i + 32), load(list.w + i + 48))));
    return total(sum);
}

// The mass at or below an edge. Higher edges never give less, to the last bit: no sum falls when a term grows.
double mass_up_to(const List& list, float edge) {
    const V e = set1(edge);
    Sum sum;
    for (int i = 0; i < list.n; i += 64) {
        V w[4];
        for (int v = 0; v < 4; v++) w[v] = not_above(load(list.d + i + 16 * v), e, load(list.w + i + 16 * v));
        accumulate(sum, add(add(w[0], w[1]), add(w[2], w[3])));
    }
    return total(sum);
}

// Sorts a short list by falling likelihood, then rising place.
void sort_small(List& list) {
    for (int i = 1; i < list.n; i++) {
        float w = list.w[i], d = list.d[i];
        int32_t place = list.place[i];
        int j = i;  // places rise, so equals stay where they are
        for (; j && list.d[j - 1] < d; j--)
            list.w[j] = list.w[j - 1], list.d[j] = list.d[j - 1], list.place[j] = list.place[j - 1];
        list.w[j] = w, list.d[j] = d, list.place[j] = place;
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
        const Ids at = in.place ? load_ids(in.place + i) : ids_from(i);
        const Mask m = greater(d, set1(bottom)) & ~greater(d, set1(high));
        fall = max(fall, keep(m, sub(set1(0), d)));
        const Taken t = taken(m);
        pack(t, w, out.w + out.n), pack(t, d, out.d + out.n), pack(t, at, out.place + out.n);
        out.n += t.n;
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
        for (int k = 0; k < kEdges; k++) {
            // At first the cut is near the low end, which is where the list was made to end.
            const double up = (double)(kEdges - 1 - k) / kEdges, share = list == &all ? up * up : up;
            float e = (float)(low + ((double)high - low) * share);
            e = e < high ? e : nextafterf(high, kMasked);
            edge[k] = k < kEdges - 1 && e > low ? e : low;
        }
        // The first edge that can be left out, sought from the middle, near which the cut is at first.
        int k = kEdges / 2;
        double mass = mass_up_to(*list, edge[k]);
        if (below + mass > spare) {
            while (++k < kEdges && below + (mass = mass_up_to(*list, edge[k])) > spare) {}
        } else {
            for (double more; k && below + (more = mass_up_to(*list, edge[k - 1])) <= spare; k--) mass = more;
        }
        const float bottom = k < kEdges ? edge[k] : kMasked;
        high = k ? edge[k - 1] : high;
        below += k < kEdges ? mass : 0;
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
        for (int i = 0; i < all.n; i++) part.w[i] = all.w[i], part.d[i] = all.d[i], part.place[i] = i;
    }
    if (part.n <= kSmall) sort_small(part);  // a longer list has equals only, in order already
    int n = part.n;
    while (n > 1 && below + part.w[n - 1] <= spare) below += part.w[--n];
    *cut = {part.d[n - 1], part.place[n - 1]};
    return true;
}

inline V kept_weights(const List& list, int i, const Cut* cut) {
    const V w = load(list.w + i);
    if (!cut) return w;
    const V d = load(list.d + i), edge = set1(cut->d);
    if (i > cut->place) return above(d, edge, w);
    if (i + 15 <= cut->place) return not_below(d, edge, w);
    return keep(greater(d, edge) | (equal(d, edge) & ((2u << (cut->place - i)) - 1)), w);
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
