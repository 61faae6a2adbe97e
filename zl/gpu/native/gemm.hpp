// Matrix products of an activation with packed records of 32 columns by 32 k, on tiles (AMX) or vectors.
// Each output element is one chain over k in order at every row count, so rows never depend on each other; quantised
// records are unpacked to the bf16 values that a plain record would hold, so the kind changes no bit either.
#pragma once
#include "gemm_blocks.hpp"

namespace zl {

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
// c[16 kRows][32] = kRows row tiles times the records that get(k) gives, in order.
template <int kRows, class Get>
inline void amx_block(const bf16* a0, const bf16* a1, int kt, Get&& get, float* c) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kRows > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < kt; k++) {
        const bf16* b = get(k);
        _tile_loadd(4, a0 + (size_t)k * kTile, 64);
        if constexpr (kRows > 1) _tile_loadd(5, a1 + (size_t)k * kTile, 64);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + kTile, 64);
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

// Up to two row tiles, plain records: they stream by, `ahead` bytes of them requested in advance.
template <class F>
inline void amx_stream(const bf16* a, int m, int kt, const Matrix& b, int nb0, int nb1, const Stream& s, Later<F>& later) {
    constexpr size_t record = 4 * kTile, ahead = 16384;
    for (int nb = nb0; nb < nb1; nb++) {
        const char* block = b.data + (size_t)nb * kt * record;
        auto next = [&](int k) {
            const char* at = block + k * record;
            prefetch_lines<record / 64, _MM_HINT_T0>(s.ahead(at, ahead));
            later.some();
            return (const bf16*)at;
        };
        if (m <= 16) amx_block<1>(a, nullptr, kt, next, later.next());
        else amx_block<2>(a, a + (size_t)kt * kTile, kt, next, later.next());
        later.put(0, m, nb);
    }
}

// More rows, plain records: the next block is fetched piecewise while this one is used, and the activation's next tiles
// come from the second-level cache.
template <class F>
inline void amx_reuse(const bf16* a, int m, int kt, const Matrix& b, int nb0, int nb1, const Stream& s, Later<F>& later) {
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
                prefetch_lines<16, _MM_HINT_T0>((const char*)(a0 + (size_t)(k + 1) * kTile));
                prefetch_lines<16, _MM_HINT_T0>((const char*)(a1 + (size_t)(k + 1) * kTile));
                later.some();
                return block + (size_t)k * 2 * kTile;
            };
            if (t + 1 < mt) amx_block<2>(a0, a1, kt, get, later.next());
            else amx_block<1>(a0, nullptr, kt, get, later.next());
            later.put(t * 16, m - t * 16 < 32 ? m - t * 16 : 32, nb);
        }
    }
}

template <int kKind, class F>
inline void amx_gemm(const bf16* a, int m, int kt, const Matrix& b, int nb0, int nb1, const Stream& s, bf16* room,
                     Later<F>& later) {
    if constexpr (kKind != kPlain) return amx_blocks<kKind>(a, m, kt, b, nb0, nb1, s, room, later);
    if (m <= 32) amx_stream(a, m, kt, b, nb0, nb1, s, later);
    else amx_reuse(a, m, kt, b, nb0, nb1, s, later);
}
#endif

// What a thread does before its blocks of one product: sets the tiles, and gives the activation as gemm takes it, in
// `room` if it must be turned.
template <class T>
inline const T* ready(const T* a, int m, int kt, const Matrix& b, T* room) {
#ifdef ZL_AMX
    if constexpr (sizeof(T) == 2)
        if (b.kind != kPlain) {
            use_block_tiles(m);
            return right_operand(a, m, kt, room + kRing * 2 * kTile);
        }
#endif
    (void)kt, (void)b, (void)room;
    use_tiles(m < 16 ? m : 16);
    return a;
}

// Blocks [nb0, nb1) of a [m, 32 * kt] activation, made `ready`, times a packed matrix. later.done(m0, rows, nb, c) gets
// up to 32 rows of float c[.][32]; the last of them come when the caller ends with later.all(). Quantised records take
// m <= kUnpackRows. room: kt + kRing records of two tiles, this thread's own, the same as for `ready`.
template <int kKind, class T, class F>
inline void gemm_of(const T* a, int m, int kt, const Matrix& b, int nb0, int nb1, const Stream& s, T* room, Later<F>& later) {
#ifdef ZL_AMX
    if constexpr (sizeof(T) == 2) return amx_gemm<kKind>(a, m, kt, b, nb0, nb1, s, room, later);
#endif
    (void)s;
    vector_gemm<kKind>(a, m, kt, b, nb0, nb1, room, later.done);
}
template <class T, class F>
inline void gemm(const T* a, int m, int kt, const Matrix& b, int nb0, int nb1, const Stream& s, T* room, Later<F>& later) {
    if constexpr (sizeof(T) == 2) {
        if (b.kind == kQ4) return gemm_of<kQ4>(a, m, kt, b, nb0, nb1, s, room, later);
        if (b.kind == kQ8) return gemm_of<kQ8>(a, m, kt, b, nb0, nb1, s, room, later);
    }
    gemm_of<kPlain>(a, m, kt, b, nb0, nb1, s, room, later);
}

}  // namespace zl
