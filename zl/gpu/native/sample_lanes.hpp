// Sixteen float lanes for the sampler on AVX-512, AVX2 and plain C++, in an anonymous namespace: each level that
// sample.cpp is compiled for has its own copy, and nothing of it can be shared at link time.
// Apart from simd.hpp because it needs no instruction set, masks as bits, compaction and sums in double.
#pragma once
#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

namespace {

constexpr float kLowest = -125.0f;  // a weight whose exponent rounds to less is zero: the others are normal floats
constexpr float kShift = 0x1.8p23f;  // added to |z| < 2^22 it leaves z, rounded to even, in the low bits of the sum

constexpr float kMasked = -__builtin_inff();

using Mask = uint32_t;  // a bit a lane

#if defined(__AVX512F__)
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
inline Mask up_to(const int32_t* p, int32_t x) { return _mm512_cmple_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(x)); }
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
// Appends the lanes of m and returns their count; writes up to sixteen elements past the end.
inline int append(Mask m, V w, V d, Ids id, float* to_w, float* to_d, int32_t* to_id) {
    _mm512_storeu_ps(to_w, _mm512_maskz_compress_ps((__mmask16)m, w));
    _mm512_storeu_ps(to_d, _mm512_maskz_compress_ps((__mmask16)m, d));
    _mm512_storeu_si512(to_id, _mm512_maskz_compress_epi32((__mmask16)m, id));
    return __builtin_popcount(m);
}
#elif defined(__AVX2__) && defined(__FMA__)
struct V {
    __m256 a, b;
};
struct Sum {
    __m256d q[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
};
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
inline void stream(float* p, V v) { _mm256_stream_ps(p, v.a), _mm256_stream_ps(p + 8, v.b); }
inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V fms(V x, V y, V z) { return {_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)}; }
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Mask bits(__m256 a, __m256 b) { return (Mask)_mm256_movemask_ps(a) | (Mask)_mm256_movemask_ps(b) << 8; }
inline Mask greater(V x, V y) { return bits(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)); }
inline Mask equal(V x, V y) { return bits(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)); }
inline Mask up_to(const int32_t* p, int32_t x) {
    const __m256i top = _mm256_set1_epi32(x);
    __m256i a = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i*)p), top);
    __m256i b = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i*)(p + 8)), top);
    return ~bits(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)) & 0xffff;
}
inline __m256 spread(Mask m) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)m), bit), bit));
}
inline V keep(Mask m, V v) { return {_mm256_and_ps(v.a, spread(m)), _mm256_and_ps(v.b, spread(m >> 8))}; }
inline __m256 scale_half(__m256 v, __m256 n, __m256 shifted) {
    __m256i e = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    __m256 w = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), e));
    return _mm256_and_ps(w, _mm256_cmp_ps(n, _mm256_set1_ps(kLowest), _CMP_GE_OQ));
}
inline V scale(V v, V n, V shifted) { return {scale_half(v.a, n.a, shifted.a), scale_half(v.b, n.b, shifted.b)}; }
inline __m256 penalise_half(__m256 x, Mask m, __m256 p) {
    __m256 y = _mm256_blendv_ps(_mm256_mul_ps(x, p), _mm256_div_ps(x, p), _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ));
    return _mm256_blendv_ps(x, y, spread(m));
}
inline V penalise(V x, Mask m, V p) { return {penalise_half(x.a, m, p.a), penalise_half(x.b, m >> 8, p.b)}; }
inline float highest(V x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
inline Mask unordered(V x, V y) {
    return bits(_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q));
}
inline V choose(Mask m, V yes, V no) {
    return {_mm256_blendv_ps(no.a, yes.a, spread(m)), _mm256_blendv_ps(no.b, yes.b, spread(m >> 8))};
}
inline float first(V x) { return _mm256_cvtss_f32(x.a); }
inline Mask non_zero(const uint32_t* p) {
    const __m256i none = _mm256_setzero_si256();
    const __m256i a = _mm256_cmpeq_epi32(_mm256_loadu_si256((const __m256i*)p), none);
    const __m256i b = _mm256_cmpeq_epi32(_mm256_loadu_si256((const __m256i*)(p + 8)), none);
    return ~bits(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)) & 0xffff;
}
inline void highest_of(V a, V b, V* in_a, V* in_b) { *in_a = set1(highest(a)), *in_b = set1(highest(b)); }
inline float sum_of(V x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline void sums_of(V a, V b, float* of_a, float* of_b) { *of_a = sum_of(a), *of_b = sum_of(b); }
inline void accumulate(Sum& s, V v) {
    s.q[0] = _mm256_add_pd(s.q[0], _mm256_cvtps_pd(_mm256_castps256_ps128(v.a)));
    s.q[1] = _mm256_add_pd(s.q[1], _mm256_cvtps_pd(_mm256_extractf128_ps(v.a, 1)));
    s.q[2] = _mm256_add_pd(s.q[2], _mm256_cvtps_pd(_mm256_castps256_ps128(v.b)));
    s.q[3] = _mm256_add_pd(s.q[3], _mm256_cvtps_pd(_mm256_extractf128_ps(v.b, 1)));
}
inline void lanes(const Sum& s, double* out) {
    for (int i = 0; i < 4; i++) _mm256_storeu_pd(out + 4 * i, s.q[i]);
}
#else
struct V {
    float f[16];
};
struct Sum {
    double f[16] = {};
};
template <class F>
inline V each(F f) {
    V r;
    for (int i = 0; i < 16; i++) r.f[i] = f(i);
    return r;
}
template <class F>
inline Mask mask(F f) {
    Mask m = 0;
    for (int i = 0; i < 16; i++) m |= (Mask)(bool)f(i) << i;
    return m;
}
inline float fused(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return (float)((double)a * b + c);  // the product is exact; rounds twice, so a last bit may differ from the fused form
#endif
}
inline V load(const float* p) {
    return each([&](int i) { return p[i]; });
}
inline void store(float* p, V v) { memcpy(p, v.f, sizeof v.f); }
inline V set1(float x) {
    return each([&](int) { return x; });
}
inline V add(V a, V b) {
    return each([&](int i) { return a.f[i] + b.f[i]; });
}
inline V sub(V a, V b) {
    return each([&](int i) { return a.f[i] - b.f[i]; });
}
inline V mul(V a, V b) {
    return each([&](int i) { return a.f[i] * b.f[i]; });
}
inline V fma(V a, V b, V c) {
    return each([&](int i) { return fused(a.f[i], b.f[i], c.f[i]); });
}
inline V fms(V a, V b, V c) {
    return each([&](int i) { return fused(a.f[i], b.f[i], -c.f[i]); });
}
inline V max(V a, V b) {
    return each([&](int i) { return a.f[i] > b.f[i] ? a.f[i] : b.f[i]; });
}
inline Mask greater(V a, V b) {
    return mask([&](int i) { return a.f[i] > b.f[i]; });
}
inline Mask equal(V a, V b) {
    return mask([&](int i) { return a.f[i] == b.f[i]; });
}
inline Mask up_to(const int32_t* p, int32_t x) {
    return mask([&](int i) { return p[i] <= x; });
}
inline V keep(Mask m, V v) {
    return each([&](int i) { return m >> i & 1 ? v.f[i] : 0.0f; });
}
inline V scale(V v, V n, V shifted) {
    return each([&](int i) {
        uint32_t e, b;
        memcpy(&e, &shifted.f[i], 4);
        memcpy(&b, &v.f[i], 4);
        b += e << 23;
        b = n.f[i] >= kLowest ? b : 0;
        float w;
        memcpy(&w, &b, 4);
        return w;
    });
}
inline V penalise(V x, Mask m, V p) {
    return each([&](int i) { return !(m >> i & 1) ? x.f[i] : x.f[i] > 0 ? x.f[i] / p.f[i] : x.f[i] * p.f[i]; });
}
inline float highest(V a) {
    float h = a.f[0];
    for (int i = 1; i < 16; i++) h = a.f[i] > h ? a.f[i] : h;
    return h;
}
inline Mask unordered(V a, V b) {
    return mask([&](int i) { return a.f[i] != a.f[i] || b.f[i] != b.f[i]; });
}
inline V choose(Mask m, V yes, V no) {
    return each([&](int i) { return m >> i & 1 ? yes.f[i] : no.f[i]; });
}
inline float first(V a) { return a.f[0]; }
inline Mask non_zero(const uint32_t* p) {
    return mask([&](int i) { return p[i] != 0; });
}
inline void highest_of(V a, V b, V* in_a, V* in_b) { *in_a = set1(highest(a)), *in_b = set1(highest(b)); }
inline float sum_of(V a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.f[i] += a.f[i + half];
    return a.f[0];
}
inline void sums_of(V a, V b, float* of_a, float* of_b) { *of_a = sum_of(a), *of_b = sum_of(b); }
inline void accumulate(Sum& s, V v) {
    for (int i = 0; i < 16; i++) s.f[i] += v.f[i];
}
inline void lanes(const Sum& s, double* out) { memcpy(out, s.f, sizeof s.f); }
#endif

#if !defined(__AVX512F__)
struct Ids {
    int32_t i[16];
};
inline Ids ids_from(int32_t first) {
    Ids r;
    for (int i = 0; i < 16; i++) r.i[i] = first + i;
    return r;
}
inline Ids load_ids(const int32_t* p) {
    Ids r;
    memcpy(r.i, p, sizeof r.i);
    return r;
}
inline int append(Mask m, V w, V d, Ids id, float* to_w, float* to_d, int32_t* to_id) {
    float from_w[16], from_d[16];
    store(from_w, w);
    store(from_d, d);
    int n = 0;
    for (; m; m &= m - 1, n++) {
        int i = __builtin_ctz(m);
        to_w[n] = from_w[i], to_d[n] = from_d[i], to_id[n] = id.i[i];
    }
    return n;
}
#endif

inline double total(const Sum& s) {
    double f[16];
    lanes(s, f);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) f[i] += f[i + half];
    return f[0];
}

}  // namespace
