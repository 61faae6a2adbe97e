// The sampler's C interface, and the counter-based draw that it uses.
// One source, compiled once for each instruction level: with -DZL_LEVEL=avx512 (or avx2, scalar, ...) every symbol gets
// that suffix, so that several levels live in one library; without it the plain names remain.
#pragma once
#include <stdint.h>

#ifdef ZL_LEVEL
#define ZL_SYM_(name, level) name##_##level
#define ZL_SYM(name, level) ZL_SYM_(name, level)
#define zl_sample_scratch_new ZL_SYM(zl_sample_scratch_new, ZL_LEVEL)
#define zl_sample_scratch_free ZL_SYM(zl_sample_scratch_free, ZL_LEVEL)
#define zl_sample_row ZL_SYM(zl_sample_row, ZL_LEVEL)
#define zl_sample_program ZL_SYM(zl_sample_program, ZL_LEVEL)
#define zl_sample_scale ZL_SYM(zl_sample_scale, ZL_LEVEL)
#define zl_sample_measured ZL_SYM(zl_sample_measured, ZL_LEVEL)
#define zl_sample_kept ZL_SYM(zl_sample_kept, ZL_LEVEL)
#define zl_filter_words ZL_SYM(zl_filter_words, ZL_LEVEL)
#define zl_filter_room ZL_SYM(zl_filter_room, ZL_LEVEL)
#define zl_filter_add ZL_SYM(zl_filter_add, ZL_LEVEL)
#define zl_filter_build ZL_SYM(zl_filter_build, ZL_LEVEL)
#define zl_filter_bitmap ZL_SYM(zl_filter_bitmap, ZL_LEVEL)
#define zl_sample_uniform ZL_SYM(zl_sample_uniform, ZL_LEVEL)
#endif

extern "C" {

struct zl_sample_scratch;

// Scratch of one thread for rows of `vocab` logits; null when memory is refused. Nothing else allocates.
zl_sample_scratch* zl_sample_scratch_new(int vocab);
void zl_sample_scratch_free(zl_sample_scratch*);

// What the head product leaves of a row beside its logits, by blocks of 32 of them (sample_blocks.hpp): the maximum, the sum
// of 2^((x - maximum) * k), and the same for k = log2(e) where want_raw. Arrays of zl_sample_stat_room(vocab) floats.
struct zl_sample_stats {
    float *top, *sum, *raw;
    float k;  // zl_sample_scale of the row; 0: sums are not needed
    int want_raw;
};
static inline int zl_sample_stat_room(int vocab) { return (vocab + 2047) / 2048 * 64; }

// Which program draws a row of these values: the index of a profile in the build's table, or their number: the generic one.
int zl_sample_program(float temperature, float top_p, float penalty);
// log2(e) / temperature as the sums want it; 0: greedy.
float zl_sample_scale(float temperature, float top_p, float penalty);

// Draws one row's token: penalty, temperature (0: greedy, lowest id among equals), top-p, inverse CDF in id order.
//   logits   float32 [vocab], read only; -inf masks a token
//   seen     bitmap of ceil(vocab / 32) words, bit id % 32 of word id / 32; null: no token was seen
//   index    the token's place in the answer; the draw is a function of (seed, index)
//   token    the id, or -1
//   logprob  log-softmax of `logits` at the token when want_logprob, else 0
//   flags    0, or 4 (NUMERIC): a NaN, a +inf, or nothing but -inf; nothing is drawn then
void zl_sample_row(const float* logits, int vocab, const uint32_t* seen, float temperature, float top_p, float penalty,
                   uint64_t seed, uint32_t index, zl_sample_scratch* scratch, int32_t* token, float* logprob,
                   uint8_t* flags, int want_logprob);

// The same for a row of whole blocks (-inf behind the vocabulary) that has been measured; changes the measures.
void zl_sample_measured(const float* logits, int vocab, const zl_sample_stats* stats, const uint32_t* seen,
                        float temperature, float top_p, float penalty, uint64_t seed, uint32_t index,
                        zl_sample_scratch* scratch, int32_t* token, float* logprob, uint8_t* flags);

// For tests: writes 1 where top-p keeps a token, else 0, by the same search; returns the count, or -1 for NUMERIC.
int zl_sample_kept(const float* logits, int vocab, const uint32_t* seen, float temperature, float top_p, float penalty,
                   zl_sample_scratch* scratch, uint8_t* kept);

// The tokens that a row has seen (filter.cpp): an exact bitmap, or a Bloom filter of 4 KiB.
struct zl_filter {
    int32_t vocab, bloom;
};
int zl_filter_words(zl_filter);  // of a row
int zl_filter_room(zl_filter);   // words that zl_filter_bitmap writes
// Adds a token of the vocabulary.
void zl_filter_add(zl_filter, uint32_t* row, int32_t id);
// Clears a row and adds n ids; ids outside the vocabulary are left out.
void zl_filter_build(zl_filter, uint32_t* row, const int32_t* ids, int n);
// A row as the bitmap that the sampler reads: itself where it is exact, else `room`, written.
const uint32_t* zl_filter_bitmap(zl_filter, const uint32_t* row, uint32_t* room);

// The draw itself, in [0, 1): Philox4x32-10, key (seed low, seed high), counter (index, 0, 0, 0), top 24 bits of word 0.
float zl_sample_uniform(uint64_t seed, uint32_t index);
}
