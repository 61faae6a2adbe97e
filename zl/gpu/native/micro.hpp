// The vector product: R rows times NT tiles of 16 columns, k in steps of 32, on AVX-512 or AVX2.
// A tile of the right-hand side is 512 elements: float [32 k][16 n], bf16 [16 k/2][16 n][2]. An output element is
// one chain over k in order, whatever R and NT are: this is what makes a row independent of its neighbours.
#pragma once
#include "simd.hpp"

namespace zl {

constexpr int kTile = 512;  // elements of one 32 x 16 tile
#ifdef __AVX512F__
constexpr int kMaxR = 8, kMaxNT = 2;
#else
constexpr int kMaxR = 5, kMaxNT = 1;
#endif

template <int R, int NT>
inline void tile_step(const float* a, size_t rs, const float* b, size_t bts, V16 (&acc)[R][NT]) {
#pragma GCC unroll 2
    for (int k = 0; k < 32; k++) {
        V16 col[NT];
        for (int t = 0; t < NT; t++) col[t] = vload(b + t * bts + k * 16);
        for (int r = 0; r < R; r++) {
            V16 x = vset1(a[r * rs + k]);
            for (int t = 0; t < NT; t++) acc[r][t] = vfma(x, col[t], acc[r][t]);
        }
    }
}

#if defined(__AVX512BF16__)
template <int R, int NT>
inline void tile_step(const bf16* a, size_t rs, const bf16* b, size_t bts, V16 (&acc)[R][NT]) {
#pragma GCC unroll 2
    for (int k = 0; k < 16; k++) {
        __m512bh col[NT];
        for (int t = 0; t < NT; t++) col[t] = (__m512bh)_mm512_loadu_si512(b + t * bts + k * 32);
        for (int r = 0; r < R; r++) {
            int pair;
            memcpy(&pair, a + r * rs + 2 * k, 4);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            for (int t = 0; t < NT; t++) acc[r][t] = _mm512_dpbf16_ps(acc[r][t], x, col[t]);
        }
    }
}
#else
inline V16 pair_low(const bf16* p) {
#ifdef __AVX512F__
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
#else
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)(p + 16)), 16))};
#endif
}
inline V16 pair_high(const bf16* p) {
#ifdef __AVX512F__
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)));
#else
    const __m256i m = _mm256_set1_epi32((int)0xffff0000);
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), m)),
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)(p + 16)), m))};
#endif
}
template <int R, int NT>
inline void tile_step(const bf16* a, size_t rs, const bf16* b, size_t bts, V16 (&acc)[R][NT]) {
#pragma GCC unroll 2
    for (int k = 0; k < 16; k++) {
        for (int t = 0; t < NT; t++) {
            V16 lo = pair_low(b + t * bts + k * 32), hi = pair_high(b + t * bts + k * 32);
            for (int r = 0; r < R; r++) {
                acc[r][t] = vfma(vset1(bf_to_float(a[r * rs + 2 * k])), lo, acc[r][t]);
                acc[r][t] = vfma(vset1(bf_to_float(a[r * rs + 2 * k + 1])), hi, acc[r][t]);
            }
        }
    }
}
#endif

// c[r][t*16..] = (add ? c : 0) + a[r][.] . b; rs, ks: strides of a by row and by 32 k; bks, bts: of b by k tile and column tile.
template <class T, int R, int NT>
__attribute__((noinline)) void product(const T* a, size_t rs, size_t ks, const T* b, size_t bks, size_t bts, int kt,
                                       float* c, size_t ldc, bool add) {
    V16 acc[R][NT];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < NT; t++) acc[r][t] = add ? vload(c + r * ldc + t * 16) : vzero();
    for (int k = 0; k < kt; k++) tile_step<R, NT>(a + k * ks, rs, b + k * bks, bts, acc);
    for (int r = 0; r < R; r++)
        for (int t = 0; t < NT; t++) vstore(c + r * ldc + t * 16, acc[r][t]);
}

template <class T, int NT>
inline void product_rows(int rows, const T* a, size_t rs, size_t ks, const T* b, size_t bks, size_t bts, int kt,
                         float* c, size_t ldc, bool add) {
    while (rows > 0) {
        int r = rows < kMaxR ? rows : kMaxR;
        switch (r) {
            case 1: product<T, 1, NT>(a, rs, ks, b, bks, bts, kt, c, ldc, add); break;
            case 2: product<T, 2, NT>(a, rs, ks, b, bks, bts, kt, c, ldc, add); break;
            case 3: product<T, 3, NT>(a, rs, ks, b, bks, bts, kt, c, ldc, add); break;
            case 4: product<T, 4, NT>(a, rs, ks, b, bks, bts, kt, c, ldc, add); break;
#ifdef __AVX512F__
            case 5: product<T, 5, NT>(a, rs, ks, b, bks, bts, kt, c, ldc, add); break;
            case 6: product<T, 6, NT>(a, rs, ks, b, bks, bts, kt, c, ldc, add); break;
            case 7: product<T, 7, NT>(a, rs, ks, b, bks, bts, kt, c, ldc, add); break;
#endif
            default: product<T, kMaxR, NT>(a, rs, ks, b, bks, bts, kt, c, ldc, add);
        }
        a += r * rs;
        c += r * ldc;
        rows -= r;
    }
}

// NT column tiles whatever the level's registers take at once.
template <class T>
inline void product_tiles(int rows, int nt, const T* a, size_t rs, size_t ks, const T* b, size_t bks, size_t bts,
                          int kt, float* c, size_t ldc, bool add) {
    int t = 0;
    if constexpr (kMaxNT == 2)
        for (; t + 2 <= nt; t += 2) product_rows<T, 2>(rows, a, rs, ks, b + t * bts, bks, bts, kt, c + t * 16, ldc, add);
    for (; t < nt; t++) product_rows<T, 1>(rows, a, rs, ks, b + t * bts, bks, bts, kt, c + t * 16, ldc, add);
}

}  // namespace zl
