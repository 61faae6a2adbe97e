// Products of an activation with quantised records on tiles. The weights are the left operand here: a column's 32 k
// then are one tile row, and one lookup among the column's 16 values unpacks it.
// Sums come out as columns by rows and are turned for `done`. Which operand is left changes no bit: a tile sums the
// products in the order of k, and a * b is b * a.
#pragma once
#include "blocks.hpp"
#include "tile.hpp"

#ifdef ZL_AMX
namespace zl {

// Turns 16 x 16 dwords; rows lie `step` dwords apart in `from` and `to_step` in `to`.
inline void turn(const void* from, size_t step, void* to, size_t to_step) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512((const int*)from + i * step);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    // a[4 i + j] holds, in its 128-bit part q, column 4 q + j of rows 4 i to 4 i + 3.
    for (int j = 0; j < 4; j++) {
        const __m512i lo = _mm512_shuffle_i32x4(a[j], a[j + 4], 0x88), hi = _mm512_shuffle_i32x4(a[j], a[j + 4], 0xdd);
        const __m512i lo2 = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x88);
        const __m512i hi2 = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xdd);
        _mm512_storeu_si512((int*)to + j * to_step, _mm512_shuffle_i32x4(lo, lo2, 0x88));
        _mm512_storeu_si512((int*)to + (j + 4) * to_step, _mm512_shuffle_i32x4(hi, hi2, 0x88));
        _mm512_storeu_si512((int*)to + (j + 8) * to_step, _mm512_shuffle_i32x4(lo, lo2, 0xdd));
        _mm512_storeu_si512((int*)to + (j + 12) * to_step, _mm512_shuffle_i32x4(hi, hi2, 0xdd));
    }
}

// Tiles 0-3 are sums [16 columns][m], 4 and 5 weights, 6 activations [16 pairs of k][m].
inline void use_block_tiles(int m) {
    TileConfig t;
    for (int i = 0; i < 8; i++) {
        t.rows[i] = 16;
        t.bytes[i] = (uint16_t)(i == 4 || i == 5 || m > 16 ? 64 : 4 * m);
    }
    load_config(t);
}

// An activation of m <= 32 rows as the right operand, made in `room`. One row needs no turning: its pairs of k lie 4
// bytes apart as they are.
inline const bf16* right_operand(const bf16* a, int m, int kt, bf16* room) {
    if (m == 1) return a;
    for (int t = 0; t < kt * (m > 16 ? 2 : 1); t++) turn(a + (size_t)t * kTile, 16, room + (size_t)t * kTile, 16);
    return room;
}

// Sums of a block: tile 2 * half + group holds columns 16 half.. of rows 16 group... Records are unpacked one ahead of
// the products: tile loads then meet stores that have reached the cache.
template <int kGroups, class Get>
inline void block_product(const bf16* a0, const bf16* a1, int a_stride, int kt, Get&& get) {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (kGroups > 1) {
        _tile_zero(1);
        _tile_zero(3);
    }
    const bf16* w = get(0);
    for (int k = 0; k < kt; k++) {
        const bf16* now = w;
        if (k + 1 < kt) w = get(k + 1);
        tile_fence();  // the tile loads see what was unpacked
        _tile_loadd(6, a0 + (size_t)k * kTile, a_stride);
        _tile_loadd(4, now, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kGroups > 1) {
            _tile_loadd(5, now + kTile, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(6, a1 + (size_t)k * kTile, a_stride);
            _tile_dpbf16ps(1, 4, 6);
            _tile_dpbf16ps(3, 5, 6);
        } else {
            _tile_loadd(4, now + kTile, 64);
            _tile_dpbf16ps(2, 4, 6);
        }
    }
}

// One block times the right operand `a`.
template <int kKind, class F>
inline void amx_blocks(const bf16* a, int m, int kt, const Matrix& b, int nb, const Stream& s, bf16* ring,
                       Later<F>& later) {
    alignas(64) float sums[4 * 256];
    constexpr size_t record = kKind == kQ4 ? kQ4Record : kQ8Record, ahead = 8192;
    const char* block = b.data + (size_t)nb * kt * record;
    auto next = [&](int k) {
        const char* at = block + k * record;
        prefetch_lines<record / 64, _MM_HINT_T0>(s.ahead(at, ahead));
        bf16* room = ring + (k % kRing) * 2 * kTile;
        unpack<kKind>(at, room);
        later.some();
        return (const bf16*)room;
    };
    float* c = later.next();
    if (m == 1) {  // a sum tile is one float a row: stored 4 bytes apart it is the row of c
        block_product<1>(a, nullptr, 4, kt, next);
        _tile_stored(0, c, 4);
        _tile_stored(2, c + 16, 4);
    } else if (m <= 16) {
        block_product<1>(a, nullptr, 64, kt, next);
        _tile_stored(0, sums, 64);
        _tile_stored(2, sums + 512, 64);
        turn(sums, 16, c, 32);
        turn(sums + 512, 16, c + 16, 32);
    } else {
        block_product<2>(a, a + (size_t)kt * kTile, 64, kt, next);
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + 256, 64);
        _tile_stored(2, sums + 512, 64);
        _tile_stored(3, sums + 768, 64);
        for (int i = 0; i < 4; i++) turn(sums + i * 256, 16, c + (i & 1) * 512 + (i >> 1) * 16, 32);
    }
    later.put(0, m, nb);
}

}  // namespace zl
#endif
