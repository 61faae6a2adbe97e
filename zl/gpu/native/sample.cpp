// One row's sampling without a sort and with no pass over all logits but the one that the head product has made
// (sample_blocks.hpp): blocks with seen tokens are measured again with the penalty, blocks are weighed by their maxima, and
// only those that may hold a candidate of top-p are read; then cut (sample_cut.hpp) and pick.
// Weights are w = 2^((x - max) * log2(e) / T), so the largest is exactly 1. Likelihood is compared by d = x - max, never
// by w. Orders are fixed: sixteen lanes, vectors added as floats, then doubles; every level that has fused multiply-add
// gives the same bits.
// No library template is used on purpose: its weak instances could be shared between levels at link time.
#include "sample.hpp"

#include <stdlib.h>

#include "sample_nucleus.hpp"

#ifdef __FAST_MATH__
#error "sample.cpp needs IEEE arithmetic: build without -ffast-math"
#endif

namespace {

constexpr uint8_t kNumeric = 4;

// What a row is drawn from.
enum Draw { kNothing, kBlocks, kList, kToken };

}  // namespace

struct zl_sample_scratch {
    float* tail;          // the row's last block where it is partial
    double* sums;         // partial sums of the draw
    zl_sample_stats own;  // of rows that come unmeasured
    // Of the row at hand.
    Nucleus nucleus;
    int32_t token;
};

namespace {

// All but the draw itself. `at.get()` is a constant where the settings are a profile's.
template <class At>
Draw prepare(const At& at, Row row, const zl_sample_stats& stats, zl_sample_scratch* s) {
    const Settings& settings = at.get();
    if (settings.penalised && row.seen) {
        row.penalty = settings.penalty;
        penalise_blocks(row, stats, s->nucleus.blocks);
    } else {
        row.seen = nullptr;
    }
    const float max = highest_of(stats.top, row.n_blocks);
    if (!is_number(max)) return kNothing;
    if (settings.greedy) {
        s->token = argmax(row, stats.top, max);
        return kToken;
    }
    s->nucleus.e = {max, settings.k_high, settings.k_low};
    if (settings.all) {
        weigh_blocks(row, stats, &s->nucleus);
        return kBlocks;
    }
    keep_top(row, stats, settings, &s->nucleus);
    return kList;
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
    if (penalty == 1.0f) row.seen = nullptr;
    double left;
    if (from == kToken) {
        *token = s->token;
    } else if (from == kList) {
        const Nucleus& top = s->nucleus;
        *token = id_of(row, top, pick(top.all, &top.cut, zl_sample_uniform(seed, index), s->sums, &left));
    } else {
        const List blocks = {s->nucleus.mass, nullptr, nullptr, (row.n_blocks + 63) / 64 * 64};
        const int b = pick(blocks, nullptr, zl_sample_uniform(seed, index), s->sums, &left);
        *token = pick_within(row, b, left, s->nucleus.e);
    }
    if (stats.want_raw) *logprob = (float)((double)row.block(*token / kBlock)[*token % kBlock] - raw_max - raw_mass);
}

}  // namespace

extern "C" {

zl_sample_scratch* zl_sample_scratch_new(int vocab) {
    zl_sample_scratch* s = (zl_sample_scratch*)calloc(1, sizeof(zl_sample_scratch));
    const size_t n = ((size_t)vocab + 511) / 512 * 512 + 512;  // appended vectors and padding overrun
    const size_t blocks = (size_t)zl_sample_stat_room(vocab) + 64;
    char* p = s ? (char*)aligned_alloc(64, (5 * n + 6 * blocks + 64) * sizeof(float) + (n / kChunk + 8) / 8 * 64) : nullptr;
    if (!p) {
        free(s);
        return nullptr;
    }
    float* f = (float*)p;
    Nucleus& nucleus = s->nucleus;
    nucleus.vocab = vocab;
    nucleus.all = {f, f + n, nullptr, 0};
    nucleus.part = {f + 2 * n, f + 3 * n, (int32_t*)(f + 4 * n), 0};
    f += 5 * n;
    s->own = {f, f + blocks, f + 2 * blocks, 0, 0};
    nucleus.mass = f + 3 * blocks;
    nucleus.blocks = (int32_t*)(f + 4 * blocks);
    nucleus.before = (int32_t*)(f + 5 * blocks);
    s->tail = f + 6 * blocks;
    s->sums = (double*)(s->tail + 64);
    return s;
}

void zl_sample_scratch_free(zl_sample_scratch* s) {
    if (s) free(s->nucleus.all.w);
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
    if (penalty == 1.0f) row.seen = nullptr;
    int n = 0;
    if (from == kToken) {
        n = kept[s->token] = 1;
    } else if (from == kList) {
        const List& all = s->nucleus.all;
        const Cut cut = s->nucleus.cut;
        for (int i = 0; i < all.n; i++)
            n += kept[id_of(row, s->nucleus, i)] = all.d[i] > cut.d || (all.d[i] == cut.d && i <= cut.place);
    } else {
        for (int i = 0; i < vocab; i++) {
            float w[kBlock];
            const Block h = row.penalised(i / kBlock);
            store(w, weight(sub(h.lo, set1(s->nucleus.e.max)), s->nucleus.e));
            store(w + 16, weight(sub(h.hi, set1(s->nucleus.e.max)), s->nucleus.e));
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
