// Keys and values in eight bits: how a token is put into a page, and how a page becomes bf16 tiles again.
//
// A token's key of one head is a scale (its largest absolute value over 127, rounded to bf16) and whole numbers from
// -127 to 127; its value likewise. Both are made once, when the token is inserted, of its own values alone. The numbers
// are multiplied as they are: by AMX in whole numbers (kv8_amx.hpp), elsewhere as bf16, which holds them exactly. The
// scores are multiplied by the keys' scales and the probabilities by the values', in float.
//
// Layout of a page of one head, in bytes
//   [keys, values][32 tokens] scales, bf16: a cache line each
//   [keys, values] tiles in the order of the bf16 blocks (context.hpp), each [32 k / 4][16 n][4 k]
#pragma once
#include "context.hpp"
#include "micro.hpp"
#include "tile.hpp"

namespace zl {

constexpr int kScaleBytes = kPage * 2, kHead8 = 2 * kScaleBytes;
constexpr float kUnit = 0x1p-24f;  // widen_tile gives numbers times 2^24

inline size_t page8_bytes(int head_pad) { return kHead8 + (size_t)2 * kPage * head_pad; }

// Where an element and a token's scales lie, in bytes from the page's beginning.
inline size_t in_tile8(int k, int n) { return (size_t)(k >> 2) * 64 + n * 4 + (k & 3); }
inline size_t k8_at(int head_pad, int dim, int token) {
    return kHead8 + (size_t)((token >> 4) * (head_pad / 32) + (dim >> 5)) * kTile + in_tile8(dim & 31, token & 15);
}
inline size_t v8_at(int head_pad, int dim, int token) {
    return kHead8 + (size_t)kPage * head_pad + (size_t)(dim >> 4) * kTile + in_tile8(token, dim & 15);
}
inline bf16* key_scales(int8_t* page) { return (bf16*)page; }
inline bf16* value_scales(int8_t* page) { return (bf16*)(page + kScaleBytes); }

// The largest bit pattern of |x|: as a number where all are finite; from 0x7f80 on where one is not.
inline unsigned most_of(const bf16* x, int n) {
    __m256i most = _mm256_setzero_si256();
    const __m256i bits = _mm256_set1_epi16(0x7fff);
    for (int i = 0; i < n; i += 16)
        most = _mm256_max_epu16(most, _mm256_and_si256(bits, _mm256_loadu_si256((const __m256i*)(x + i))));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
    return 0xffff ^ (unsigned)_mm_extract_epi16(least, 0);
}

// Sixteen floats as whole numbers of eight bits, half to even.
inline void vstore_bytes(int8_t* to, V16 v) {
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
#else
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b));
    const __m256i in_order = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1)));
#endif
}

// One token's n values; returns the scale. What is not finite has a NaN for a scale; what is below 2^-60 is zero.
inline bf16 quantise(const bf16* x, int n, int8_t* out) {
    const unsigned top = most_of(x, n);
    if (top >= 0x7f80 || top < 0x2180) {
        memset(out, 0, (size_t)n);
        return top >= 0x7f80 ? 0x7fc0 : 0;
    }
    const bf16 scale = float_to_bf(bf_to_float((bf16)top) / 127.0f);
    const V16 by = vset1(1.0f / bf_to_float(scale));
    for (int i = 0; i < n; i += 16) vstore_bytes(out + i, vmul(vload_as_float(x + i), by));
    return scale;
}

inline void insert_key8(int8_t* page, int head_pad, int t, const int8_t* q) {
    for (int d = 0; d < head_pad; d += 4) memcpy(page + k8_at(head_pad, d, t), q + d, 4);
}
inline void insert_value8(int8_t* page, int head_pad, int t, const int8_t* q) {
    for (int d = 0; d < head_pad; d++) page[v8_at(head_pad, d, t)] = q[d];
}
// Four tokens from t, a multiple of four, on; their numbers lie 128 apart.
inline void insert_values8(int8_t* page, int head_pad, int t, const int8_t* q) {
    for (int d = 0; d < head_pad; d += 16) {
        auto row = [&](int i) { return _mm_loadu_si128((const __m128i*)(q + i * 128 + d)); };
        const __m128i lo01 = _mm_unpacklo_epi8(row(0), row(1)), hi01 = _mm_unpackhi_epi8(row(0), row(1));
        const __m128i lo23 = _mm_unpacklo_epi8(row(2), row(3)), hi23 = _mm_unpackhi_epi8(row(2), row(3));
        __m128i* to = (__m128i*)(page + v8_at(head_pad, d, t));
        _mm_storeu_si128(to, _mm_unpacklo_epi16(lo01, lo23));
        _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(lo01, lo23));
        _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(hi01, hi23));
        _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(hi01, hi23));
    }
}

// As insert of attention.hpp: tokens [from, from + count) of a page from rows of k and v that lie `stride` apart.
inline void insert8(int8_t* page, int head_pad, int from, int count, const bf16* k, const bf16* v, int stride) {
    if (from == 0 && count < kPage) memset(page, 0, page8_bytes(head_pad));  // scales may be left that are NaN
    alignas(64) int8_t q[4 * 128];
    const int end = from + count;
    for (int t = from; t < end; t++, k += stride) {
        key_scales(page)[t] = quantise(k, head_pad, q);
        insert_key8(page, head_pad, t, q);
    }
    for (int t = from; t < end;) {
        const int some = t % 4 == 0 && t + 4 <= end ? 4 : 1;
        for (int i = 0; i < some; i++, v += stride) value_scales(page)[t + i] = quantise(v, head_pad, q + i * 128);
        some == 4 ? insert_values8(page, head_pad, t, q) : insert_value8(page, head_pad, t, q);
        t += some;
    }
}

// The scales of 32 tokens, times kUnit.
inline void read_scales(const int8_t* from, float* to) {
    for (int i = 0; i < kPage; i += 16) vstore(to + i, vmul(vload_as_float((const bf16*)from + i), vset1(kUnit)));
}

// One tile in bf16, times 2^24: a byte at the top of a dword is its number times 2^24, whose float has no bits in the
// lower half.
inline void widen_tile(const int8_t* from, bf16* to) {
#ifdef __AVX512F__
    auto pick = [](int byte) { return _mm512_set1_epi32(byte << 24 | 0x808080); };  // shuffles a dword's byte to its top
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 8, 0, 0, 0, 12));
    const __m512i second = _mm512_add_epi8(pick(1), lanes), third = _mm512_add_epi8(pick(2), lanes);
    const __m512i top = _mm512_set1_epi32((int)0xff000000);
    auto wide = [](__m512i x) { return _mm512_castps_si512(_mm512_cvtepi32_ps(x)); };
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512i x = _mm512_load_si512(from + i * 64);
        const __m512i a = wide(_mm512_slli_epi32(x, 24)), b = wide(_mm512_shuffle_epi8(x, second));
        const __m512i c = wide(_mm512_shuffle_epi8(x, third)), d = wide(_mm512_and_si512(x, top));
        _mm512_store_si512(to + i * 64, _mm512_or_si512(_mm512_srli_epi32(a, 16), b));
        _mm512_store_si512(to + i * 64 + 32, _mm512_or_si512(_mm512_srli_epi32(c, 16), d));
    }
#else
    const __m256i top = _mm256_set1_epi32((int)0xff000000);
    auto wide = [](__m256i x) { return _mm256_castps_si256(_mm256_cvtepi32_ps(x)); };
    for (int i = 0; i < 16; i++) {  // half of four k
        const __m256i x = _mm256_load_si256((const __m256i*)(from + i * 32));
        const __m256i a = wide(_mm256_slli_epi32(x, 24)), b = wide(_mm256_and_si256(_mm256_slli_epi32(x, 16), top));
        const __m256i c = wide(_mm256_and_si256(_mm256_slli_epi32(x, 8), top)), d = wide(_mm256_and_si256(x, top));
        bf16* row = to + (i >> 1) * 64 + (i & 1) * 16;
        _mm256_store_si256((__m256i*)row, _mm256_or_si256(_mm256_srli_epi32(a, 16), b));
        _mm256_store_si256((__m256i*)(row + 32), _mm256_or_si256(_mm256_srli_epi32(c, 16), d));
    }
#endif
}

// The keys or the values of a page as bf16 tiles.
inline void widen_half(const int8_t* tiles, int head_pad, bf16* to) {
    for (int i = 0; i < head_pad / 16; i++) widen_tile(tiles + i * kTile, to + i * kTile);
}

// A thread's room beside that of attention in bf16: numbers of the queries and of what is summed, or a half as tiles.
inline size_t room8_bytes(int head_pad) { return (size_t)32 * head_pad * 5 + 2 * 32 * 32 * 4; }

}  // namespace zl
