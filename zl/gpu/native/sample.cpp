// One row's sampling without a sort: scan (penalty, maximum), weigh (exp, sum, candidates), cut (top-p), pick (draw).
// Weights are w = 2^((x - max) * log2(e) / T), so the largest is exactly 1. Likelihood is compared by d = x - max, never
// by w. Orders are fixed: sixteen lanes, four vectors added as floats, then doubles; every level that has fused
// multiply-add gives the same bits.
// No library template is used on purpose: its weak instances could be shared between levels at link time.
#include "sample.hpp"

#include <math.h>
#include <stdlib.h>

#include "sample_lanes.hpp"

#ifdef __FAST_MATH__
#error "sample.cpp needs IEEE arithmetic: build without -ffast-math"
#endif

namespace {

constexpr int kBlock = 512;    // logits that share one maximum; the unit of all passes over a row
constexpr int kChunk = 256;    // candidates that share one partial sum of the draw
constexpr int kEdges = 8;      // of one turn of the threshold search
constexpr int kSmall = 32;     // up to here a list is sorted by insertion
constexpr float kMinTemperature = 5e-7f;  // half of the wire's unit; below is greedy
constexpr double kLog2e = 1.4426950408889634074;
constexpr float kMasked = -__builtin_inff();
constexpr uint8_t kNumeric = 4;

// 2^f on [-0.5, 0.5]: fitted at Chebyshev nodes with p(0) = 1, relative error below 9e-9.
constexpr float kP6 = 0x1.444004p-13f, kP5 = 0x1.5f0896p-10f, kP4 = 0x1.3b2a1cp-7f, kP3 = 0x1.c6af6cp-5f,
                kP2 = 0x1.ebfbe0p-3f, kP1 = 0x1.62e430p-1f;

inline int blocks_of(int vocab) { return (vocab + kBlock - 1) / kBlock; }

// A row as whole blocks: all but the last one in place, the last one padded with -inf where it is partial.
struct Row {
    const float* base;
    const float* tail;
    int n_whole, n_blocks;
    float max;
    const float* block(int b) const { return b < n_whole ? base + (size_t)b * kBlock : tail; }
};

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

enum Collect { kNothing, kCandidates, kDense };

}  // namespace

struct zl_sample_scratch {
    int vocab;
    float* x;      // penalised logits, whole blocks
    float* tail;   // the raw row's last block where it is partial
    float* top;    // a maximum a block
    double* sums;  // partial sums of the draw
    List all, part;
};

namespace {

template <bool kPenalty>
inline Mask scan_block(const float* logits, const uint32_t* seen, V penalty, float* x, float* raw_top, float* top) {
    V raw[2] = {set1(kMasked), set1(kMasked)}, best[2] = {raw[0], raw[1]};
    Mask bad = 0;
    for (int j = 0; j < kBlock; j += 32) {
        uint32_t word = kPenalty ? seen[j / 32] : 0;
        for (int h = 0; h < 2; h++) {
            V v = load(logits + j + 16 * h);
            bad |= not_finite(v);
            raw[h] = max(raw[h], v);
            if (kPenalty) {
                if (word) v = penalise(v, word >> 16 * h & 0xffff, penalty);
                best[h] = max(best[h], v);
                store(x + j + 16 * h, v);
            }
        }
    }
    float r = highest(max(raw[0], raw[1]));
    *raw_top = r > *raw_top ? r : *raw_top;
    *top = kPenalty ? highest(max(best[0], best[1])) : r;
    return bad;
}

// First pass: penalty, maxima, finiteness. Fills the raw and the penalised row; false: NUMERIC.
bool scan(const float* logits, int vocab, const uint32_t* seen, float penalty, zl_sample_scratch* s, Row* raw, Row* row) {
    const bool on = seen && penalty != 1.0f;
    const int n_whole = vocab / kBlock, n_blocks = blocks_of(vocab), n_left = vocab - n_whole * kBlock;
    *raw = {logits, s->tail, n_whole, n_blocks, kMasked};
    *row = on ? Row{s->x, s->x + (size_t)n_whole * kBlock, n_whole, n_blocks, kMasked} : *raw;
    uint32_t words[kBlock / 32] = {};
    if (n_left) {
        memcpy(s->tail, logits + (size_t)n_whole * kBlock, n_left * sizeof(float));
        for (int i = n_left; i < kBlock; i++) s->tail[i] = kMasked;
        if (on) memcpy(words, seen + n_whole * (kBlock / 32), (n_left + 31) / 32 * sizeof(uint32_t));
    }
    Mask bad = 0;
    for (int b = 0; b < n_blocks; b++) {
        const uint32_t* w = b < n_whole && on ? seen + b * (kBlock / 32) : words;
        bad |= on ? scan_block<true>(raw->block(b), w, set1(penalty), s->x + (size_t)b * kBlock, &raw->max, s->top + b)
                  : scan_block<false>(raw->block(b), w, set1(penalty), nullptr, &raw->max, s->top + b);
    }
    // A penalty below 1 can overflow what was finite, hence the second look.
    for (int b = 0; b < n_blocks; b++) row->max = s->top[b] > row->max ? s->top[b] : row->max;
    return !bad && row->max <= FLT_MAX && row->max >= -FLT_MAX;
}

int32_t argmax(const Row& row, const float* top) {
    int b = 0;
    while (top[b] != row.max) b++;
    const float* x = row.block(b);
    for (int j = 0;; j += 16)
        if (Mask m = equal(load(x + j), set1(row.max))) return b * kBlock + j + __builtin_ctz(m);
}

struct Exponent {
    V max, high, low;  // log2(e) / T in two parts, so that the exponent's fraction is right to its last bit
};

inline V weight(V d, const Exponent& e) {
    V shifted = fma(d, e.high, set1(kShift));
    V n = sub(shifted, set1(kShift));
    V f = fma(d, e.low, fms(d, e.high, n));
    V p = fma(set1(kP6), f, set1(kP5));
    p = fma(p, f, set1(kP4));
    p = fma(p, f, set1(kP3));
    p = fma(p, f, set1(kP2));
    p = fma(p, f, set1(kP1));
    p = fma(p, f, set1(1.0f));
    return scale(p, n, shifted);
}

template <bool kList, bool kStore>
inline void weigh_block(const float* x, const Exponent& e, float floor, int first, Sum& sum, List* list) {
    for (int j = 0; j < kBlock; j += 64) {
        V w[4];
        for (int i = 0; i < 4; i++) {
            V d = sub(load(x + j + 16 * i), e.max);
            w[i] = weight(d, e);
            if (kStore) store(list->w + first + j + 16 * i, w[i]);
            if (kList)
                if (Mask m = greater(d, set1(floor))) {
                    add_to(*list, m, w[i], d, ids_from(first + j + 16 * i));
                    w[i] = keep(~m, w[i]);
                }
        }
        accumulate(sum, add(add(w[0], w[1]), add(w[2], w[3])));
    }
}

// Second pass: the weights' sum. On the way it lists every weight, or the tokens above max + floor, which are left out of
// the sum then.
template <Collect kWhat>
double weigh(const Row& row, double temperature, float floor, const float* top, List* list) {
    const double k = kLog2e / temperature;
    const float high = (float)k;
    const Exponent e = {set1(row.max), set1(high), set1((float)(k - high))};
    Sum sum;
    for (int b = 0; b < row.n_blocks; b++) {
        const float* x = row.block(b);
        if (kWhat == kCandidates && top[b] - row.max > floor) weigh_block<true, false>(x, e, floor, b * kBlock, sum, list);
        else weigh_block<false, kWhat == kDense>(x, e, floor, b * kBlock, sum, list);
    }
    return total(sum);
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

// Third pass: finds how much of the unlikely end can be left out: at most `spare` of mass, `below` of it being outside
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
            float e = (float)(high - ((double)high - low) * (k + 1) / kEdges);
            e = e < high ? e : nextafterf(high, kMasked);
            edge[k] = k < kEdges - 1 && e > low ? e : low;
        }
        masses_below(*list, edge, mass);
        int k = 0;
        while (k < kEdges && below + mass[k] > spare) k++;
        const float bottom = k < kEdges ? edge[k] : kMasked;
        high = k ? edge[k - 1] : high;
        below += k < kEdges ? mass[k] : 0;
        V fall = set1(0);
        const int n = list->n;
        part.n = 0;  // appending in place is safe: it never gets past what was read
        for (int i = 0; i < n; i += 16) {
            V d = load(list->d + i);
            Mask m = greater(d, set1(bottom)) & ~greater(d, set1(high));
            if (!m) continue;
            fall = max(fall, keep(m, sub(set1(0), d)));
            add_to(part, m, load(list->w + i), d, load_ids(list->id + i));
        }
        if (!part.n) {  // rounding between two turns: all that is above stays
            *cut = {high, INT32_MAX};
            return true;
        }
        pad(part);
        low = -highest(fall);
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

// Last pass: inverse CDF over the kept tokens in id order. The list is padded with zero weights to whole groups of four
// vectors. Returns the place in the list: of the token at which the sum exceeds u times the kept mass, else of the last.
int pick(const List& list, const Cut* cut, float u, double* sums) {
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
            if (w[j] > 0) last = i + j;
            if ((below += w[j]) > draw) return i + j;
        }
    }
    return last;
}

// Weighs the row and finds its cut. Tokens below max + T ln(share) are no candidates; with share = (1 - p) / 2V all of them
// have less mass together than top-p may leave out. Models have far fewer candidates: a higher share, fitted on chat
// logits, is tried first, and whether it sufficed shows at once. It decides the speed only.
Cut keep_top(const Row& row, int vocab, float temperature, float top_p, zl_sample_scratch* s) {
    if (!(top_p >= 0)) top_p = 0;  // keeps the likeliest token, as 0 does
    const double rest = 1.0 - (double)top_p, sure = rest / (2.0 * vocab), guess = rest * rest / 16;
    Cut cut;
    double mass = 0;
    for (double share = guess > sure ? guess : sure;; share = sure * mass) {
        const float floor = (float)(temperature * log(share));
        s->all.n = 0;
        const double below = weigh<kCandidates>(row, temperature, floor, s->top, &s->all);
        pad(s->all);
        mass = below + mass_of(s->all);
        if (find_cut(s->all, floor, below, rest * mass, s->part, &cut)) return cut;
        if (share <= sure * mass) return {kMasked, INT32_MAX};  // out of reach: half of `rest` at most is below
    }
}

inline bool is_greedy(float temperature) { return !(temperature >= kMinTemperature); }

}  // namespace

extern "C" {

zl_sample_scratch* zl_sample_scratch_new(int vocab) {
    zl_sample_scratch* s = (zl_sample_scratch*)calloc(1, sizeof(zl_sample_scratch));
    const size_t n = ((size_t)blocks_of(vocab) + 1) * kBlock;  // a block more: appended vectors and padding overrun
    char* p = s ? (char*)aligned_alloc(64, (7 * n + kBlock) * sizeof(float) + n / 4 * sizeof(double)) : nullptr;
    if (!p) {
        free(s);
        return nullptr;
    }
    s->vocab = vocab;
    s->x = (float*)p;
    float* f = s->x + n;
    int32_t* ids = (int32_t*)(f + 4 * n);
    s->all = {f, f + n, ids, 0};
    s->part = {f + 2 * n, f + 3 * n, ids + n, 0};
    s->tail = (float*)(ids + 2 * n);
    s->sums = (double*)(s->tail + kBlock);
    s->top = (float*)(s->sums + n / 8);
    return s;
}

void zl_sample_scratch_free(zl_sample_scratch* s) {
    if (s) free(s->x);
    free(s);
}

void zl_sample_row(const float* logits, int vocab, const uint32_t* seen, float temperature, float top_p, float penalty,
                   uint64_t seed, uint32_t index, zl_sample_scratch* s, int32_t* token, float* logprob, uint8_t* flags,
                   int want_logprob) {
    Row raw, row;
    *token = -1, *logprob = 0, *flags = kNumeric;
    if (!scan(logits, vocab, seen, penalty, s, &raw, &row)) return;
    *flags = 0;
    if (is_greedy(temperature)) {
        *token = argmax(row, s->top);
    } else if (top_p >= 1.0f) {
        List& all = s->all;
        weigh<kDense>(row, temperature, 0, s->top, &all);
        all.n = row.n_blocks * kBlock;
        *token = pick(all, nullptr, zl_sample_uniform(seed, index), s->sums);
    } else {
        const Cut cut = keep_top(row, vocab, temperature, top_p, s);
        *token = s->all.id[pick(s->all, &cut, zl_sample_uniform(seed, index), s->sums)];
    }
    if (want_logprob) {
        const double mass = weigh<kNothing>(raw, 1.0, 0, s->top, nullptr);
        *logprob = (float)((double)logits[*token] - raw.max - log(mass));
    }
}

int zl_sample_kept(const float* logits, int vocab, const uint32_t* seen, float temperature, float top_p, float penalty,
                   zl_sample_scratch* s, uint8_t* kept) {
    Row raw, row;
    memset(kept, 0, vocab);
    if (!scan(logits, vocab, seen, penalty, s, &raw, &row)) return -1;
    int n = 0;
    if (is_greedy(temperature)) {
        kept[argmax(row, s->top)] = 1;
        return 1;
    }
    if (top_p >= 1.0f) {
        weigh<kDense>(row, temperature, 0, s->top, &s->all);
        for (int i = 0; i < vocab; i++) n += kept[i] = s->all.w[i] > 0;
        return n;
    }
    const Cut cut = keep_top(row, vocab, temperature, top_p, s);
    const List& all = s->all;
    for (int i = 0; i < all.n; i++)
        n += kept[all.id[i]] = all.d[i] > cut.d || (all.d[i] == cut.d && all.id[i] <= cut.id);
    return n;
}

void zl_seen_add(uint32_t* seen, int32_t id) { seen[id >> 5] |= 1u << (id & 31); }

void zl_seen_build(uint32_t* seen, int vocab, const int32_t* ids, int n) {
    memset(seen, 0, ((size_t)vocab + 31) / 32 * sizeof(uint32_t));
    for (int i = 0; i < n; i++)
        if ((uint32_t)ids[i] < (uint32_t)vocab) zl_seen_add(seen, ids[i]);
}

// Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
float zl_sample_uniform(uint64_t seed, uint32_t index) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32), c[4] = {index, 0, 0, 0};
    for (int r = 0; r < 10; r++) {
        uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
        c[3] = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (float)(c[0] >> 8) * 0x1p-24f;
}
}
