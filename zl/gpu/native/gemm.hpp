// Matrix products of an activation with packed records of 32 columns by 32 k, on tiles (AMX) or vectors.
// Each output element is one chain over k in order at every row count, so rows never depend on each other; quantised
// records are unpacked to the bf16 values that a plain record would hold, so the kind changes no bit either.
#pragma once
#include "blocks.hpp"
#include "tile.hpp"

namespace zl {

// The bytes that a thread reads next: its range of the matrix at hand, then its range of the one after.
struct Stream {
    const char *end, *next;
    const char* ahead(const char* p, size_t by) const {
        p += by;
        return p < end ? p : next + (p - end);
    }
};

template <int kKind, class T>
inline const T* tiles_of(const char* record, T* room) {
    if constexpr (kKind == kPlain) {
        return (const T*)record;
    } else {
        unpack<kKind>(record, room);
        return room;
    }
}

template <int kKind, class T, class F>
inline void vector_gemm(const T* a, int m, int kt, const Matrix& b, int nb0, int nb1, T* room, F&& done) {
    alignas(64) float c[16 * 32];
    const size_t record = record_bytes(kKind, sizeof(T));
    for (int nb = nb0; nb < nb1; nb++) {
        const char* at = b.data + (size_t)nb * kt * record;
        const T* block = (const T*)at;
        if constexpr (kKind != kPlain) {
            for (int k = 0; k < kt; k++) unpack<kKind>(at + k * record, room + (size_t)k * 2 * kTile);
            block = room;
        }
        for (int m0 = 0; m0 < m; m0 += 16) {
            int rows = m - m0 < 16 ? m - m0 : 16;
            product_tiles<T>(rows, 2, a + (size_t)(m0 / 16) * kt * kTile, 32, kTile, block, 2 * kTile, kTile, kt, c, 32,
                             false);
            done(m0, rows, nb, (const float*)c);
        }
    }
}

#ifdef ZL_AMX
// c[16 kRows][32] = kRows row tiles times the records that get(k) gives, in order. With kAhead get runs one record
// ahead of the products: their tile loads then meet stores that have reached the cache.
template <int kRows, bool kAhead, class Get>
inline void amx_block(const bf16* a0, const bf16* a1, int kt, Get&& get, float* c) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kRows > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const bf16* b = kAhead ? get(0) : nullptr;
    for (int k = 0; k < kt; k++) {
        const bf16* now = kAhead ? b : get(k);
        _tile_loadd(4, a0 + (size_t)k * kTile, 64);
        if constexpr (kRows > 1) _tile_loadd(5, a1 + (size_t)k * kTile, 64);
        if (kAhead && k + 1 < kt) b = get(k + 1);
        tile_fence();  // the tile loads see what was unpacked
        _tile_loadd(6, now, 64);
        _tile_loadd(7, now + kTile, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kRows > 1) _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kRows > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    if constexpr (kRows > 1) {
        _tile_stored(2, c + 512, 128);
        _tile_stored(3, c + 512 + 16, 128);
    }
}

// Up to two row tiles: the records stream by, `ahead` bytes of them requested in advance.
template <int kKind, class F>
inline void amx_stream(const bf16* a, int m, int kt, const Matrix& b, int nb0, int nb1, const Stream& s, bf16* room,
                       F&& done) {
    alignas(64) float c[32 * 32];
    constexpr size_t record = kKind == kQ4 ? kQ4Record : kKind == kQ8 ? kQ8Record : 4 * kTile;
    constexpr size_t ahead = kKind == kPlain ? 16384 : 8192;
    for (int nb = nb0; nb < nb1; nb++) {
        const char* block = b.data + (size_t)nb * kt * record;
        auto next = [&](int k) {
            const char* at = block + k * record;
            prefetch_lines<record / 64, _MM_HINT_T0>(s.ahead(at, ahead));
            return tiles_of<kKind>(at, room + (k & 3) * 2 * kTile);
        };
        if (m <= 16) amx_block<1, kKind != kPlain>(a, nullptr, kt, next, c);
        else amx_block<2, kKind != kPlain>(a, a + (size_t)kt * kTile, kt, next, c);
        done(0, m, nb, (const float*)c);
    }
}

// More rows, plain records: the next block is fetched piecewise while this one is used.
template <class F>
inline void amx_reuse(const bf16* a, int m, int kt, const Matrix& b, int nb0, int nb1, const Stream& s, F&& done) {
    alignas(64) float c[32 * 32];
    const int mt = (m + 15) / 16, pairs = (mt + 1) / 2, per = (32 + pairs - 1) / pairs;
    const size_t a_step = (size_t)kt * kTile;
    for (int nb = nb0; nb < nb1; nb++) {
        const bf16* block = (const bf16*)b.data + (size_t)nb * kt * 2 * kTile;
        const char* next = s.ahead((const char*)block, (size_t)kt * 4 * kTile);
        for (int t = 0; t < mt; t += 2) {
            const bf16 *a0 = a + t * a_step, *a1 = a0 + a_step;
            const char* fetch = next + (size_t)(t / 2) * kt * per * 64;
            auto get = [&](int k) {
                for (int i = 0; i < per; i++) _mm_prefetch(fetch + (size_t)(k * per + i) * 64, _MM_HINT_T1);
                return block + (size_t)k * 2 * kTile;
            };
            if (t + 1 < mt) amx_block<2, false>(a0, a1, kt, get, c);
            else amx_block<1, false>(a0, nullptr, kt, get, c);
            done(t * 16, m - t * 16 < 32 ? m - t * 16 : 32, nb, (const float*)c);
        }
    }
}

template <int kKind, class F>
inline void amx_gemm(const bf16* a, int m, int kt, const Matrix& b, int nb0, int nb1, const Stream& s, bf16* room,
                     F&& done) {
    if (kKind != kPlain || m <= 32) amx_stream<kKind>(a, m, kt, b, nb0, nb1, s, room, done);
    else amx_reuse(a, m, kt, b, nb0, nb1, s, done);
}
#endif

// Blocks [nb0, nb1) of a [m, 32 * kt] activation times a packed matrix; done(m0, rows, nb, c) gets up to 32 rows of
// float c[32][32]. Blocks take m <= kUnpackRows. room: kt records of two tiles, this thread's own.
template <int kKind, class T, class F>
inline void gemm_of(const T* a, int m, int kt, const Matrix& b, int nb0, int nb1, const Stream& s, T* room, F&& done) {
#ifdef ZL_AMX
    if constexpr (sizeof(T) == 2) return amx_gemm<kKind>(a, m, kt, b, nb0, nb1, s, room, done);
#endif
    (void)s;
    vector_gemm<kKind>(a, m, kt, b, nb0, nb1, room, done);
}
template <class T, class F>
inline void gemm(const T* a, int m, int kt, const Matrix& b, int nb0, int nb1, const Stream& s, T* room, F&& done) {
    if constexpr (sizeof(T) == 2) {
        if (b.kind == kQ4) return gemm_of<kQ4>(a, m, kt, b, nb0, nb1, s, room, done);
        if (b.kind == kQ8) return gemm_of<kQ8>(a, m, kt, b, nb0, nb1, s, room, done);
    }
    gemm_of<kPlain>(a, m, kt, b, nb0, nb1, s, room, done);
}

}  // namespace zl
