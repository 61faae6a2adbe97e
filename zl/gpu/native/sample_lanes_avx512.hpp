// The sampler's sixteen lanes in one AVX-512 register. Included by sample_lanes.hpp only, which says what they are.
#pragma once

namespace {

using V = __m512;
struct Sum {
    __m512d a = _mm512_setzero_pd(), b = _mm512_setzero_pd();
};
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
// Past the caches, to a multiple of 64 bytes; a store fence before other threads are told.
inline void stream(float* p, V v) { _mm512_stream_ps(p, v); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V fms(V a, V b, V c) { return _mm512_fmsub_ps(a, b, c); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline Mask greater(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask equal(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
// v where d is above the edge (not above, not below), else 0.
inline V above(V d, V edge, V v) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(d, edge, _CMP_GT_OQ), v); }
inline V not_above(V d, V edge, V v) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(d, edge, _CMP_NGT_UQ), v); }
inline V not_below(V d, V edge, V v) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(d, edge, _CMP_GE_OQ), v); }
inline V keep(Mask m, V v) { return _mm512_maskz_mov_ps((__mmask16)m, v); }
// v * 2^n where n is not below kLowest, else 0; `shifted` is n + kShift.
inline V scale(V v, V n, V shifted) {
    __m512i e = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    __mmask16 m = _mm512_cmp_ps_mask(n, _mm512_set1_ps(kLowest), _CMP_GE_OQ);
    return _mm512_castsi512_ps(_mm512_maskz_add_epi32(m, _mm512_castps_si512(v), e));
}
inline V penalise(V x, Mask m, V p) {
    __mmask16 pos = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
    V y = _mm512_mask_mul_ps(x, (__mmask16)m & ~pos, x, p);
    return _mm512_mask_div_ps(y, (__mmask16)m & pos, x, p);
}
inline float highest(V a) { return _mm512_reduce_max_ps(a); }
inline Mask unordered(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline V choose(Mask m, V yes, V no) { return _mm512_mask_mov_ps(no, (__mmask16)m, yes); }
inline float first(V a) { return _mm512_cvtss_f32(a); }
inline Mask non_zero(const uint32_t* p) {
    const __m512i v = _mm512_loadu_si512(p);
    return _mm512_test_epi32_mask(v, v);
}
// Folds lane i with i + 8, the eight with i + 4, and so on; a's result in the lower eight lanes, b's in the upper.
#define ZL_FOLD(op)                                                                             \
    V u = op(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));               \
    u = op(u, _mm512_shuffle_f32x4(u, u, 0xb1));                                                \
    u = op(u, _mm512_permute_ps(u, 0x4e));                                                      \
    u = op(u, _mm512_permute_ps(u, 0xb1));
// The highest lane of each, in all lanes.
inline void highest_of(V a, V b, V* in_a, V* in_b) {
    ZL_FOLD(_mm512_max_ps)
    *in_a = _mm512_shuffle_f32x4(u, u, 0x00);
    *in_b = _mm512_shuffle_f32x4(u, u, 0xff);
}
inline void sums_of(V a, V b, float* of_a, float* of_b) {
    ZL_FOLD(_mm512_add_ps)
    *of_a = _mm512_cvtss_f32(u);
    *of_b = _mm_cvtss_f32(_mm512_extractf32x4_ps(u, 2));
}
inline float sum_of(V x) {
    float of_a, of_b;
    sums_of(x, x, &of_a, &of_b);
    return of_a;
}
#undef ZL_FOLD
inline void accumulate(Sum& s, V v) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    s.a = _mm512_add_pd(s.a, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
    s.b = _mm512_add_pd(s.b, _mm512_cvtps_pd(high));
}
inline void lanes(const Sum& s, double* out) {
    _mm512_storeu_pd(out, s.a);
    _mm512_storeu_pd(out + 8, s.b);
}
using Ids = __m512i;
inline Ids ids_from(int32_t first) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(lane, _mm512_set1_epi32(first));
}
inline Ids load_ids(const int32_t* p) { return _mm512_loadu_si512(p); }
// The lanes of a mask, to be stored side by side; writes up to sixteen elements past the n that count.
struct Taken {
    __mmask16 m;
    int n;
};
inline Taken taken(Mask m) { return {(__mmask16)m, __builtin_popcount(m)}; }
inline void pack(Taken t, V v, float* to) { _mm512_storeu_ps(to, _mm512_maskz_compress_ps(t.m, v)); }
inline void pack(Taken t, Ids v, int32_t* to) { _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(t.m, v)); }

}  // namespace
