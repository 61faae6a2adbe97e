// One row's sampling without a sort and with no pass over all logits but the one that the head product has made
// (sample_blocks.hpp): blocks with seen tokens are measured again with the penalty, blocks are weighed by their maxima, and
// only those that may hold a candidate of top-p are read; then cut (sample_cut.hpp) and pick.
// Weights are w = 2^((x - max) * log2(e) / T), so the largest is exactly 1. Likelihood is compared by d = x - max, never
// by w. Orders are fixed: sixteen lanes, vectors added as floats, then doubles; every level that has fused multiply-add
// gives the same bits.
// No library template is used on purpose: its weak instances could be shared between levels at link time.
#include "sample.hpp"

#include <math.h>
#include <stdlib.h>

#include "sample_blocks.hpp"
#include "sample_cut.hpp"
#include "sample_settings.hpp"

#ifdef __FAST_MATH__
#error "sample.cpp needs IEEE arithmetic: build without -ffast-math"
#endif

namespace {

constexpr uint8_t kNumeric = 4;
constexpr int kAhead = 16;  // blocks of a list that are requested in advance: logits come from the last cache

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

// What a row is drawn from.
enum Draw { kNothing, kBlocks, kList, kToken };

}  // namespace

struct zl_sample_scratch {
    int vocab;
    float* tail;   // the row's last block where it is partial
    double* sums;  // partial sums of the draw
    List all, part;
    List blocks;   // w: every block's mass; id: those of interest
    zl_sample_stats own;  // of rows that come unmeasured
    // Of the row at hand.
    Exponent e;
    Cut cut;
    int32_t token;
};

namespace {

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

// Every block's mass. The sum of them, in floats, is good enough to choose by.
float weigh_blocks(const Row& row, const zl_sample_stats& stats, zl_sample_scratch* s) {
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
int choose_floor(const Row& row, const zl_sample_stats& stats, const Settings& at, float spare, zl_sample_scratch* s) {
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
double list_above(const Row& row, const zl_sample_stats& stats, float floor, zl_sample_scratch* s) {
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
void keep_top(const Row& row, const zl_sample_stats& stats, const Settings& at, zl_sample_scratch* s) {
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

// All but the draw itself. `at.get()` is a constant where the settings are a profile's.
template <class At>
Draw prepare(const At& at, Row row, const zl_sample_stats& stats, zl_sample_scratch* s) {
    const Settings& settings = at.get();
    if (settings.penalised && row.seen) {
        row.penalty = settings.penalty;
        penalise_blocks(row, stats, s->blocks.id);
    } else {
        row.seen = nullptr;
    }
    const float max = highest_of(stats.top, row.n_blocks);
    if (!is_number(max)) return kNothing;
    if (settings.greedy) {
        s->token = argmax(row, stats.top, max);
        return kToken;
    }
    s->e = {max, settings.k_high, settings.k_low};
    if (settings.all) {
        weigh_blocks(row, stats, s);
        return kBlocks;
    }
    keep_top(row, stats, settings, s);
    return kList;
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

Row row_of(const float* logits, int vocab, const uint32_t* seen, float penalty, zl_sample_scratch* s) {
    const int n_whole = vocab / kBlock, n_left = vocab - n_whole * kBlock;
    if (n_left) {
        memcpy(s->tail, logits + (size_t)n_whole * kBlock, n_left * sizeof(float));
        for (int i = n_left; i < kBlock; i++) s->tail[i] = kMasked;
    }
    return {logits, s->tail, n_whole, n_whole + (n_left > 0), seen, penalty};
}

zl_sample_stats measured(const Row& row, float k, int want_raw, zl_sample_scratch* s) {
    zl_sample_stats stats = s->own;
    stats.k = k, stats.want_raw = want_raw;
    measure_all(row, stats);
    return stats;
}

void draw(Row row, const zl_sample_stats& stats, float temperature, float top_p, float penalty, uint64_t seed,
          uint32_t index, zl_sample_scratch* s, int32_t* token, float* logprob, uint8_t* flags) {
    *token = -1, *logprob = 0, *flags = kNumeric;
    pad(stats, row.n_blocks);
    const float raw_max = highest_of(stats.top, row.n_blocks);
    if (!is_number(raw_max)) return;
    const double raw_mass = stats.want_raw ? log_mass(stats, row.n_blocks, raw_max) : 0;
    const Draw from = with_settings(temperature, top_p, penalty, [&](auto at) { return prepare(at, row, stats, s); });
    if (from == kNothing) return;
    *flags = 0;
    double left;
    if (from == kToken) {
        *token = s->token;
    } else if (from == kList) {
        *token = s->all.id[pick(s->all, &s->cut, zl_sample_uniform(seed, index), s->sums, &left)];
    } else {
        if (penalty == 1.0f) row.seen = nullptr;
        const int b = pick(s->blocks, nullptr, zl_sample_uniform(seed, index), s->sums, &left);
        *token = pick_within(row, b, left, s->e);
    }
    if (stats.want_raw) *logprob = (float)((double)row.block(*token / kBlock)[*token % kBlock] - raw_max - raw_mass);
}

}  // namespace

extern "C" {

zl_sample_scratch* zl_sample_scratch_new(int vocab) {
    zl_sample_scratch* s = (zl_sample_scratch*)calloc(1, sizeof(zl_sample_scratch));
    const size_t n = ((size_t)vocab + 511) / 512 * 512 + 512;  // appended vectors and padding overrun
    const size_t blocks = (size_t)zl_sample_stat_room(vocab) + 64;
    char* p = s ? (char*)aligned_alloc(64, (6 * n + 6 * blocks + 64) * sizeof(float) + (n / kChunk + 8) / 8 * 64) : nullptr;
    if (!p) {
        free(s);
        return nullptr;
    }
    s->vocab = vocab;
    float* f = (float*)p;
    int32_t* ids = (int32_t*)(f + 4 * n);
    s->all = {f, f + n, ids, 0};
    s->part = {f + 2 * n, f + 3 * n, ids + n, 0};
    f = (float*)(ids + 2 * n);
    s->own = {f, f + blocks, f + 2 * blocks, 0, 0};
    s->blocks = {f + 3 * blocks, nullptr, (int32_t*)(f + 4 * blocks), 0};
    s->tail = f + 6 * blocks;
    s->sums = (double*)(s->tail + 64);
    return s;
}

void zl_sample_scratch_free(zl_sample_scratch* s) {
    if (s) free(s->all.w);
    free(s);
}

int zl_sample_program(float temperature, float top_p, float penalty) {
    return with_settings(temperature, top_p, penalty, [](auto at) { return at.index; });
}

float zl_sample_scale(float temperature, float top_p, float penalty) {
    return with_settings(temperature, top_p, penalty, [](auto at) { return at.get().k_high; });
}

void zl_sample_measured(const float* logits, int vocab, const zl_sample_stats* stats, const uint32_t* seen,
                        float temperature, float top_p, float penalty, uint64_t seed, uint32_t index,
                        zl_sample_scratch* s, int32_t* token, float* logprob, uint8_t* flags) {
    const int n_blocks = (vocab + kBlock - 1) / kBlock;
    draw({logits, nullptr, n_blocks, n_blocks, seen, penalty}, *stats, temperature, top_p, penalty, seed, index, s, token,
         logprob, flags);
}

void zl_sample_row(const float* logits, int vocab, const uint32_t* seen, float temperature, float top_p, float penalty,
                   uint64_t seed, uint32_t index, zl_sample_scratch* s, int32_t* token, float* logprob, uint8_t* flags,
                   int want_logprob) {
    const Row row = row_of(logits, vocab, seen, penalty, s);
    const zl_sample_stats stats = measured(row, zl_sample_scale(temperature, top_p, penalty), want_logprob, s);
    draw(row, stats, temperature, top_p, penalty, seed, index, s, token, logprob, flags);
}

int zl_sample_kept(const float* logits, int vocab, const uint32_t* seen, float temperature, float top_p, float penalty,
                   zl_sample_scratch* s, uint8_t* kept) {
    Row row = row_of(logits, vocab, seen, penalty, s);
    memset(kept, 0, vocab);
    const zl_sample_stats stats = measured(row, zl_sample_scale(temperature, top_p, penalty), 0, s);
    pad(stats, row.n_blocks);
    if (!is_number(highest_of(stats.top, row.n_blocks))) return -1;
    const Draw from = with_settings(temperature, top_p, penalty, [&](auto at) { return prepare(at, row, stats, s); });
    if (from == kNothing) return -1;
    int n = 0;
    if (from == kToken) {
        n = kept[s->token] = 1;
    } else if (from == kList) {
        const List& all = s->all;
        for (int i = 0; i < all.n; i++)
            n += kept[all.id[i]] = all.d[i] > s->cut.d || (all.d[i] == s->cut.d && all.id[i] <= s->cut.id);
    } else {
        if (penalty == 1.0f) row.seen = nullptr;
        for (int i = 0; i < vocab; i++) {
            float w[kBlock];
            const Block h = row.penalised(i / kBlock);
            store(w, weight(sub(h.lo, set1(s->e.max)), s->e));
            store(w + 16, weight(sub(h.hi, set1(s->e.max)), s->e));
            n += kept[i] = w[i % kBlock] > 0;
        }
    }
    return n;
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
