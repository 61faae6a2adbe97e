// Attention over eight-bit pages on tiles, in whole numbers.
//
// A query is taken as 16 bits of its largest value, a weight (probability times the value's scale) as 16 bits of the
// largest scale: a high and a low byte each, which are rows of a tile of their own. The sums are exact, so no order of
// them matters; they hold rows of up to 65,536 tokens (255 * 127 * 65,536 < 2^31).
//
// Tiles: 0-3 sums, 4 and 5 bytes of queries or weights, 6 keys or values; few are live (tile.hpp). Up to eight queries
// have both bytes in one tile (Pair 1), else the low ones have their own (Pair 2).
#pragma once
#include <cmath>

#include "kv8.hpp"

#ifdef ZL_AMX
namespace zl {

constexpr float kQueryMost = 127 * 256, kWeightMost = 65504;

inline bool one_tile(int rows) { return rows <= 8; }

// For `rows` queries, or for up to 16.
inline void use_tiles8(int rows) {
    TileConfig t;
    const int left = one_tile(rows) ? 2 * rows : 16;
    for (int i = 0; i < 8; i++) {
        t.bytes[i] = i == 4 || i == 5 ? 32 : 64;
        t.rows[i] = (uint8_t)(i < 6 ? left : 8);
    }
    load_config(t);
}

// Page(p) gives a page of the row; Next() requests one tile more of what will be read.
template <class Tile, class Page, class Next>
struct Eight {
    const Tile& t;
    const int head_pad;
    const V16 rate;
    Page page;
    Next next;
    int8_t* const q;       // [high, low][row][head_pad]
    int32_t* const found;  // [2 pages][high, low][row][32] products of queries and keys
    int32_t* const sums;   // [high, low][row][head_pad]
    float* scores;                // [page][row][32]
    uint8_t* bytes;               // [page][high, low][row][32] weights
    float *peak, *total, *top;    // as in Attention
    int low = 0;                  // rows before the low bytes
    alignas(64) int32_t most[16 * 16];  // the largest scale of a value, as bits: a NaN is larger than all
    float unit[16], by[16];             // of a query's number; weight to number

    Eight(const Tile& tile, int head_pad_, V16 rate_, Page page_, Next next_, char* room)
        : t(tile), head_pad(head_pad_), rate(rate_), page(page_), next(next_), q((int8_t*)room),
          found((int32_t*)(room + 32 * head_pad_)), sums(found + 2 * 1024) {}

    void split_queries() {
        for (int r = 0; r < t.rows; r++) {
            const bf16* x = (const bf16*)t.q + r * t.stride;
            const unsigned largest = most_of(x, head_pad);
            const bool finite = largest < 0x7f80, some = finite && largest >= 0x2180;
            const float size = bf_to_float((bf16)largest) / kQueryMost;
            unit[r] = some ? size : finite ? 0.0f : NAN;
            const V16 to = vset1(some ? 1.0f / size : 0.0f);
            for (int d = 0; d < head_pad; d += 16) {
                const __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(vload_as_float(x + d), to));
                const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
                _mm_storeu_si128((__m128i*)(q + r * head_pad + d), _mm512_cvtepi32_epi8(high));
                _mm_storeu_si128((__m128i*)(q + (low + r) * head_pad + d), _mm512_cvtepi32_epi8(n));
            }
        }
    }
    // Sums of a query's bytes with a page's keys to scores, and their maxima.
    inline void see(int p) {
        const bf16* scale = (const bf16*)page(p);
        const V16 k0 = vload_as_float(scale), k1 = vload_as_float(scale + 16);
        const __m512i v0 = _mm512_castps_si512(vload_as_float(scale + kPage));
        const __m512i v1 = _mm512_castps_si512(vload_as_float(scale + kPage + 16));
        const int32_t* from = found + (p & 1) * 1024;
        const bool whole = t.end[0] >= (p + 1) * kPage;  // of all rows: ends never fall
        for (int r = 0; r < t.rows; r++) {
            const V16 size = vset1(unit[r]);
            auto sum = [&](int at) {
                const __m512i high = _mm512_slli_epi32(_mm512_load_si512(from + r * 32 + at), 8);
                return _mm512_cvtepi32_ps(_mm512_add_epi32(high, _mm512_load_si512(from + (low + r) * 32 + at)));
            };
            V16 a = vmul(vmul(sum(0), k0), size), b = vmul(vmul(sum(16), k1), size);
            float* s = scores + ((size_t)p * t.rows + r) * 32;
            vstore(s, a);
            vstore(s + 16, b);
            __m512i x = v0, y = v1;
            if (!whole) {
                const int n = t.end[r] - p * kPage;
                a = vkeep(n, a, vset1(-3.0e38f)), b = vkeep(n - 16, b, vset1(-3.0e38f));
                x = _mm512_castps_si512(vkeep(n, _mm512_castsi512_ps(x), vzero()));
                y = _mm512_castps_si512(vkeep(n - 16, _mm512_castsi512_ps(y), vzero()));
            }
            vstore(peak + r * 16, vmax(vload(peak + r * 16), vmax(a, b)));
            _mm512_store_si512(most + r * 16, _mm512_max_epi32(_mm512_load_si512(most + r * 16), _mm512_max_epi32(x, y)));
        }
    }
    // Scores of a page to weights, as bytes, and their exponentials to the totals.
    inline void exponentials(int p) {
        const bf16* scale = (const bf16*)page(p) + kPage;
        const V16 v0 = vload_as_float(scale), v1 = vload_as_float(scale + 16);
        const bool whole = t.end[0] >= (p + 1) * kPage;
        uint8_t* to = bytes + (size_t)p * 1024;
        for (int r = 0; r < t.rows; r++) {
            const float* s = scores + ((size_t)p * t.rows + r) * 32;
            const V16 from = vset1(top[r]), times = vset1(by[r]);
            V16 a = vexp2(vfms(vload(s), rate, from)), b = vexp2(vfms(vload(s + 16), rate, from));
            V16 x = vmul(vmul(a, v0), times), y = vmul(vmul(b, v1), times);
            if (!whole) {
                const int n = t.end[r] - p * kPage;
                a = vkeep(n, a, vzero()), b = vkeep(n - 16, b, vzero());
                x = vkeep(n, x, vzero()), y = vkeep(n - 16, y, vzero());
            }
            vstore(total + r * 16, vadd(vload(total + r * 16), vadd(a, b)));
            put_bytes(to, r, 0, _mm512_cvtps_epi32(x));
            put_bytes(to, r, 16, _mm512_cvtps_epi32(y));
        }
    }
    inline void put_bytes(uint8_t* to, int r, int at, __m512i n) {
        _mm_store_si128((__m128i*)(to + r * 32 + at), _mm512_cvtepi32_epi8(_mm512_srli_epi32(n, 8)));
        _mm_store_si128((__m128i*)(to + (low + r) * 32 + at), _mm512_cvtepi32_epi8(n));
    }

    template <int Pair>
    void score() {
        const int kt = head_pad / 32;
        tile_fence();
        for (int p = 0; p < t.pages; p++) {
            int32_t* to = found + (p & 1) * 1024;
            for (int half = 0; half < 2; half++, to += 16) {  // of the tokens
                const int8_t* k = page(p) + kHead8 + half * kt * kTile;
                _tile_zero(0);
                if constexpr (Pair == 2) _tile_zero(1);
                for (int i = 0; i < kt; i++) {
                    _tile_loadd(4, q + i * 32, head_pad);
                    if constexpr (Pair == 2) _tile_loadd(5, q + 16 * head_pad + i * 32, head_pad);
                    _tile_loadd(6, k + i * kTile, 64);
                    next();
                    _tile_dpbssd(0, 4, 6);
                    if constexpr (Pair == 2) _tile_dpbssd(1, 5, 6);
                }
                if (p && half == 0) see(p - 1);
                _tile_stored(0, to, 128);
                if constexpr (Pair == 2) _tile_stored(1, to + 512, 128);
            }
        }
        see(t.pages - 1);
    }
    // Two or four column tiles of 16 dimensions, from tile `first` on. The weights are written two pages before a tile
    // load reads them, which would wait for stores that are just behind it.
    template <int Pair, int N>
    void weigh(int first) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (Pair == 2 || N == 4) _tile_zero(2);
        if constexpr (Pair == 2 || N == 4) _tile_zero(3);
        for (int p = 0; p < t.pages; p++) {
            const int8_t* v = page(p) + kHead8 + (size_t)kPage * head_pad + first * kTile;
            tile_fence();
            _tile_loadd(4, bytes + (size_t)p * 1024, 32);
            if constexpr (Pair == 2) _tile_loadd(5, bytes + (size_t)p * 1024 + 512, 32);
            _tile_loadd(6, v, 64);
            next();
            _tile_dpbusd(0, 4, 6);
            if constexpr (Pair == 2) _tile_dpbusd(2, 5, 6);
            _tile_loadd(6, v + kTile, 64);
            next();
            _tile_dpbusd(1, 4, 6);
            if constexpr (Pair == 2) _tile_dpbusd(3, 5, 6);
            if constexpr (N == 4) {
                _tile_loadd(6, v + 2 * kTile, 64);
                next();
                _tile_dpbusd(2, 4, 6);
                _tile_loadd(6, v + 3 * kTile, 64);
                next();
                _tile_dpbusd(3, 4, 6);
            }
            if (first == 0 && p + 2 < t.pages) exponentials(p + 2);
        }
        int32_t* to = sums + first * 16;
        _tile_stored(0, to, head_pad * 4);
        _tile_stored(1, to + 16, head_pad * 4);
        if constexpr (Pair == 2) to += 16 * head_pad;
        if constexpr (Pair == 2 || N == 4) _tile_stored(2, to + (Pair == 2 ? 0 : 32), head_pad * 4);
        if constexpr (Pair == 2 || N == 4) _tile_stored(3, to + (Pair == 2 ? 16 : 48), head_pad * 4);
    }

    // Leaves the weighted sums in out, f32 [row][head_pad], and the exponentials' sums in `total`.
    template <int Pair>
    void run(float* out) {
        low = Pair == 2 ? 16 : t.rows;
        split_queries();
        for (int r = 0; r < t.rows; r++) {
            vstore(peak + r * 16, vset1(-3.0e38f));
            vstore(total + r * 16, vzero());
            _mm512_store_si512(most + r * 16, _mm512_setzero_si512());
        }
        score<Pair>();
        float size[16];
        for (int r = 0; r < t.rows; r++) {
            const int32_t bits = _mm512_reduce_max_epi32(_mm512_load_si512(most + r * 16));
            memcpy(size + r, &bits, 4);
            size[r] /= kWeightMost;
            by[r] = size[r] > 0 ? 1.0f / size[r] : 0.0f;
            top[r] = vhmax(vmul(vload(peak + r * 16), rate));
        }
        exponentials(0);
        if (t.pages > 1) exponentials(1);
        int d = 0;
        if constexpr (Pair == 1)
            for (; d + 4 <= head_pad / 16; d += 4) weigh<Pair, 4>(d);
        for (; d < head_pad / 16; d += 2) weigh<Pair, 2>(d);
        for (int r = 0; r < t.rows; r++)
            for (int d = 0; d < head_pad; d += 16) {
                const V16 high = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + r * head_pad + d));
                const V16 rest = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + (low + r) * head_pad + d));
                vstore(out + r * head_pad + d, vmul(vfma(high, vset1(256.0f), rest), vset1(size[r])));
            }
    }
};

}  // namespace zl
#endif
