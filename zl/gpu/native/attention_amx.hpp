// The two products of attention on tiles. Tile numbers are instruction immediates, hence the unrolling by hand.
// Tiles 0-5 have as many rows as there are queries (use_tiles), 6 sixteen. Few tiles are live: see tile.hpp.
#pragma once
#include "micro.hpp"
#include "tile.hpp"

#ifdef ZL_AMX
namespace zl {

template <int KT, class Block, class Each>
inline void amx_scores_of(const bf16* q, size_t stride, int rows, int pages, Block&& block, Each&& each, float* out) {
    tile_fence();
    _tile_loadd(2, q, stride * 2);
    if constexpr (KT > 1) _tile_loadd(3, q + 32, stride * 2);
    if constexpr (KT > 2) _tile_loadd(4, q + 64, stride * 2);
    if constexpr (KT > 3) _tile_loadd(5, q + 96, stride * 2);
    for (int p = 0; p < pages; p++, out += (size_t)rows * 32) {
        const bf16 *k0 = block(p), *k1 = k0 + KT * kTile;
        _tile_zero(0);
        _tile_stream_loadd(6, k0, 64);
        each(p, 0);
        _tile_dpbf16ps(0, 2, 6);
        if constexpr (KT > 1) {
            _tile_stream_loadd(6, k0 + kTile, 64);
            each(p, 1);
            _tile_dpbf16ps(0, 3, 6);
        }
        if constexpr (KT > 2) {
            _tile_stream_loadd(6, k0 + 2 * kTile, 64);
            each(p, 2);
            _tile_dpbf16ps(0, 4, 6);
        }
        if constexpr (KT > 3) {
            _tile_stream_loadd(6, k0 + 3 * kTile, 64);
            each(p, 3);
            _tile_dpbf16ps(0, 5, 6);
        }
        _tile_stored(0, out, 128);
        _tile_zero(1);
        _tile_stream_loadd(6, k1, 64);
        each(p, KT);
        _tile_dpbf16ps(1, 2, 6);
        if constexpr (KT > 1) {
            _tile_stream_loadd(6, k1 + kTile, 64);
            each(p, KT + 1);
            _tile_dpbf16ps(1, 3, 6);
        }
        if constexpr (KT > 2) {
            _tile_stream_loadd(6, k1 + 2 * kTile, 64);
            each(p, KT + 2);
            _tile_dpbf16ps(1, 4, 6);
        }
        if constexpr (KT > 3) {
            _tile_stream_loadd(6, k1 + 3 * kTile, 64);
            each(p, KT + 3);
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(1, out + 16, 128);
    }
}

// out[page][row][32] = q . k of block(page); kt k tiles a head, at most four. each(page, i) is called
// after the loading of tile i of a page's 2 kt, when the page before has been stored.
template <class Block, class Each>
inline void amx_scores(int kt, const bf16* q, size_t stride, int rows, int pages, Block&& block, Each&& each, float* out) {
    switch (kt) {
        case 1: return amx_scores_of<1>(q, stride, rows, pages, block, each, out);
        case 2: return amx_scores_of<2>(q, stride, rows, pages, block, each, out);
        case 3: return amx_scores_of<3>(q, stride, rows, pages, block, each, out);
        default: return amx_scores_of<4>(q, stride, rows, pages, block, each, out);
    }
}

// Up to four column tiles of 16 dimensions over all pages.
template <int N, class Block, class Each>
inline void amx_weigh_of(const bf16* probs, int rows, int pages, Block&& block, int first, Each&& each, float* out,
                         int ld, bool add) {
    tile_fence();
    if (add) {
        _tile_loadd(0, out + first * 16, (size_t)ld * 4);
        if constexpr (N > 1) _tile_loadd(1, out + first * 16 + 16, (size_t)ld * 4);
        if constexpr (N > 2) _tile_loadd(2, out + first * 16 + 32, (size_t)ld * 4);
        if constexpr (N > 3) _tile_loadd(3, out + first * 16 + 48, (size_t)ld * 4);
    } else {
        _tile_zero(0);
        if constexpr (N > 1) _tile_zero(1);
        if constexpr (N > 2) _tile_zero(2);
        if constexpr (N > 3) _tile_zero(3);
    }
    for (int p = 0; p < pages; p++) {
        const bf16* v = block(p) + (size_t)first * kTile;
        tile_fence();
        _tile_loadd(4, probs + (size_t)p * rows * 32, 64);
        _tile_stream_loadd(6, v, 64);
        _tile_dpbf16ps(0, 4, 6);
        each(p, first);
        if constexpr (N > 1) {
            _tile_stream_loadd(6, v + kTile, 64);
            _tile_dpbf16ps(1, 4, 6);
            each(p, first + 1);
        }
        if constexpr (N > 2) {
            _tile_stream_loadd(6, v + 2 * kTile, 64);
            _tile_dpbf16ps(2, 4, 6);
            each(p, first + 2);
        }
        if constexpr (N > 3) {
            _tile_stream_loadd(6, v + 3 * kTile, 64);
            _tile_dpbf16ps(3, 4, 6);
            each(p, first + 3);
        }
    }
    _tile_stored(0, out + first * 16, (size_t)ld * 4);
    if constexpr (N > 1) _tile_stored(1, out + first * 16 + 16, (size_t)ld * 4);
    if constexpr (N > 2) _tile_stored(2, out + first * 16 + 32, (size_t)ld * 4);
    if constexpr (N > 3) _tile_stored(3, out + first * 16 + 48, (size_t)ld * 4);
}

// out[row][n * 16] = (add ? out : 0) + sum over pages of probs . v of block(page). each(page, i) is called after tile i of a page;
// the next page's probs may be written until the last call of its page.
template <class Block, class Each>
inline void amx_weigh(int n, const bf16* probs, int rows, int pages, Block&& block, Each&& each, float* out,
                      bool add) {
    const int ld = n * 16;
    int d = 0;
    for (; d + 4 <= n; d += 4) amx_weigh_of<4>(probs, rows, pages, block, d, each, out, ld, add);
    if (n - d == 2) amx_weigh_of<2>(probs, rows, pages, block, d, each, out, ld, add);
}

}  // namespace zl
#endif
