// Matrix products of an activation with packed blocks of 32 columns, on tiles (AMX) or vectors.
// Each output element is one chain over k in order at every row count, so rows never depend on each other.
#pragma once
#include "micro.hpp"
#include "tile.hpp"

namespace zl {

// Blocks [nb0, nb1) of a [m, 32 * kt] activation times a packed matrix; done(m0, rows, nb, c) gets up to 32 rows of
// float c[32][32]. `limit` ends the run of blocks that this thread will probably go on with (for prefetching).
template <class T, class F>
inline void gemm(const T* a, int m, int kt, const T* b, int nb0, int nb1, F&& done) {
    alignas(64) float c[16 * 32];
    for (int nb = nb0; nb < nb1; nb++) {
        const T* block = b + (size_t)nb * kt * 2 * kTile;
        for (int m0 = 0; m0 < m; m0 += 16) {
            int rows = m - m0 < 16 ? m - m0 : 16;
            product_tiles<T>(rows, 2, a + (size_t)(m0 / 16) * kt * kTile, 32, kTile, block, 2 * kTile, kTile, kt, c, 32,
                             false);
            done(m0, rows, nb, (const float*)c);
        }
    }
}

#ifdef ZL_AMX
template <class F>
inline void gemm(const bf16* a, int m, int kt, const bf16* b, int nb0, int nb1, F&& done) {
    alignas(64) float c[32 * 32];
    const int mt = (m + 15) / 16;
    constexpr int ahead = 16384;  // bytes of the stream of weights requested in advance
    for (int nb = nb0; nb < nb1; nb++) {
        const bf16* block = b + (size_t)nb * kt * 2 * kTile;
        int t = 0;
        if (mt == 1) {
            _tile_zero(0);
            _tile_zero(1);
            for (int k = 0; k < kt; k++) {
                const bf16* bk = block + (size_t)k * 2 * kTile;
                _tile_loadd(4, a + (size_t)k * kTile, 64);
                _tile_loadd(6, bk, 64);
                _tile_loadd(7, bk + kTile, 64);
                prefetch_lines<32, _MM_HINT_T0>((const char*)bk + ahead);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, c, 128);
            _tile_stored(1, c + 16, 128);
            done(0, m, nb, (const float*)c);
            continue;
        }
        // The next block is fetched piecewise while this one is used.
        const int pairs = (mt + 1) / 2, per = (kt * 32 + pairs * kt - 1) / (pairs * kt);
        const char* next = (const char*)(block + (size_t)kt * 2 * kTile);
        for (; t + 2 <= mt; t += 2) {
            const bf16 *a0 = a + (size_t)t * kt * kTile, *a1 = a0 + (size_t)kt * kTile;
            const char* fetch = next + (size_t)(t / 2) * kt * per * 64;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int k = 0; k < kt; k++) {
                const bf16* bk = block + (size_t)k * 2 * kTile;
                _tile_loadd(4, a0 + (size_t)k * kTile, 64);
                _tile_loadd(6, bk, 64);
                _tile_loadd(5, a1 + (size_t)k * kTile, 64);
                _tile_loadd(7, bk + kTile, 64);
                for (int i = 0; i < per; i++) _mm_prefetch(fetch + (k * per + i) * 64, _MM_HINT_T1);
                prefetch_lines<16, _MM_HINT_T0>((const char*)(a0 + (size_t)(k + 2) * kTile));
                prefetch_lines<16, _MM_HINT_T0>((const char*)(a1 + (size_t)(k + 2) * kTile));
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, c, 128);
            _tile_stored(1, c + 16, 128);
            _tile_stored(2, c + 512, 128);
            _tile_stored(3, c + 512 + 16, 128);
            done(t * 16, m - t * 16 < 32 ? m - t * 16 : 32, nb, (const float*)c);
        }
        if (t < mt) {
            const bf16* a0 = a + (size_t)t * kt * kTile;
            _tile_zero(0);
            _tile_zero(1);
            for (int k = 0; k < kt; k++) {
                const bf16* bk = block + (size_t)k * 2 * kTile;
                _tile_loadd(4, a0 + (size_t)k * kTile, 64);
                _tile_loadd(6, bk, 64);
                _tile_loadd(7, bk + kTile, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, c, 128);
            _tile_stored(1, c + 16, 128);
            done(t * 16, m - t * 16, nb, (const float*)c);
        }
    }
}
#endif

}  // namespace zl
