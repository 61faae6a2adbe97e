// Sixteen float lanes on every level: one __m512, or two __m256. All stage code is written against these.
// Floating-point contraction is off in the build; every fused multiply-add is spelled out, so a row's bits do not
// depend on what the compiler chose for one template instance.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace zl {

using bf16 = uint16_t;

inline float bf_to_float(bf16 v) {
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// Round to nearest even; a NaN stays a NaN.
inline bf16 float_to_bf(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)((u >> 16) | 0x40);
    return (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#ifdef __AVX512F__
using V16 = __m512;
inline V16 vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, V16 v) { _mm512_storeu_ps(p, v); }
inline V16 vset1(float x) { return _mm512_set1_ps(x); }
inline V16 vzero() { return _mm512_setzero_ps(); }
inline V16 vadd(V16 a, V16 b) { return _mm512_add_ps(a, b); }
inline V16 vsub(V16 a, V16 b) { return _mm512_sub_ps(a, b); }
inline V16 vmul(V16 a, V16 b) { return _mm512_mul_ps(a, b); }
inline V16 vdiv(V16 a, V16 b) { return _mm512_div_ps(a, b); }
inline V16 vfma(V16 a, V16 b, V16 c) { return _mm512_fmadd_ps(a, b, c); }
inline V16 vfnma(V16 a, V16 b, V16 c) { return _mm512_fnmadd_ps(a, b, c); }
inline V16 vfms(V16 a, V16 b, V16 c) { return _mm512_fmsub_ps(a, b, c); }
// Both return the second operand when either is a NaN.
inline V16 vmax(V16 a, V16 b) { return _mm512_max_ps(a, b); }
inline V16 vmin(V16 a, V16 b) { return _mm512_min_ps(a, b); }
inline V16 vround(V16 a) { return _mm512_roundscale_ps(a, 0); }
inline V16 vpow2(V16 x, V16 n) { return _mm512_scalef_ps(x, n); }
inline float vsum(V16 a) { return _mm512_reduce_add_ps(a); }
inline float vhmax(V16 a) { return _mm512_reduce_max_ps(a); }
// Lanes below n keep v, the others take fill.
inline V16 vkeep(int n, V16 v, V16 fill) {
    __mmask16 m = n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
    return _mm512_mask_blend_ps(m, fill, v);
}
inline V16 vload_as_float(const bf16* p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
inline __m256i vto_bf(V16 v) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    __m512i u = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#endif
}
inline void vstore_from_float(bf16* p, V16 v) { _mm256_storeu_si256((__m256i*)p, vto_bf(v)); }
constexpr float kExpLow = -104.0f;  // scalef underflows to zero by itself
#else
struct V16 {
    __m256 a, b;
};
inline V16 vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void vstore(float* p, V16 v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
inline V16 vset1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V16 vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V16 vadd(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V16 vsub(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V16 vmul(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V16 vdiv(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V16 vfma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V16 vfnma(V16 x, V16 y, V16 z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
inline V16 vfms(V16 x, V16 y, V16 z) { return {_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)}; }
inline V16 vmax(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V16 vmin(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V16 vround(V16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 pow2_half(__m256 x, __m256 n) {
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
inline V16 vpow2(V16 x, V16 n) { return {pow2_half(x.a, n.a), pow2_half(x.b, n.b)}; }
inline float vsum(V16 x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float vhmax(V16 x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
inline V16 vkeep(int n, V16 v, V16 fill) {
    const __m256i idx = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), idx));
    __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), idx));
    return {_mm256_blendv_ps(fill.a, v.a, lo), _mm256_blendv_ps(fill.b, v.b, hi)};
}
inline V16 vload_as_float(const bf16* p) {
    __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
inline __m256i round_half(__m256 v) {
    __m256i u = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
    return _mm256_srli_epi32(r, 16);
}
inline void vstore_from_float(bf16* p, V16 v) {
    __m256i packed = _mm256_packus_epi32(round_half(v.a), round_half(v.b));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
constexpr float kExpLow = -87.3f;  // the exponent is built by a shift and must stay normal
#endif

inline V16 vload_as_float(const float* p) { return vload(p); }
inline void vstore_from_float(float* p, V16 v) { vstore(p, v); }
// 32 values at once.
inline void vstore_pair(bf16* p, V16 lo, V16 hi) {
#ifdef __AVX512BF16__
    _mm512_store_si512(p, (__m512i)_mm512_cvtne2ps_pbh(hi, lo));
#else
    vstore_from_float(p, lo);
    vstore_from_float(p + 16, hi);
#endif
}
inline void vstore_pair(float* p, V16 lo, V16 hi) {
    vstore(p, lo);
    vstore(p + 16, hi);
}

// out[2 i], out[2 i + 1] = a[i], b[i] of sixteen each.
inline void vinterleave(bf16* out, const bf16* a, const bf16* b) {
#ifdef __AVX512F__
    const __m512i lo = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
    const __m512i hi = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    _mm512_storeu_si512(out, _mm512_or_si512(lo, _mm512_slli_epi32(hi, 16)));
#else
    for (int i = 0; i < 16; i += 8) {
        const __m128i x = _mm_loadu_si128((const __m128i*)(a + i)), y = _mm_loadu_si128((const __m128i*)(b + i));
        _mm_storeu_si128((__m128i*)(out + 2 * i), _mm_unpacklo_epi16(x, y));
        _mm_storeu_si128((__m128i*)(out + 2 * i + 8), _mm_unpackhi_epi16(x, y));
    }
#endif
}
// Sixteen pairs of bf16 that lie `stride` elements apart, side by side.
inline void vcollect_pairs(bf16* out, const bf16* from, int stride) {
    const __m256i at = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(stride));
#ifdef __AVX512F__
    const __m512i far = _mm512_inserti64x4(_mm512_castsi256_si512(at), _mm256_add_epi32(at, _mm256_set1_epi32(8 * stride)), 1);
    _mm512_storeu_si512(out, _mm512_i32gather_epi32(far, from, 2));
#else
    _mm256_storeu_si256((__m256i*)out, _mm256_i32gather_epi32((const int*)from, at, 2));
    _mm256_storeu_si256((__m256i*)(out + 16), _mm256_i32gather_epi32((const int*)(from + 8 * stride), at, 2));
#endif
}

// exp: reduction by ln 2 in two parts, Taylor polynomial of degree 7 (error below 6e-9 on the reduced range).
// A NaN passes through: the clamps return their second operand.
inline V16 vexp(V16 x) {
    x = vmin(vset1(88.3f), vmax(vset1(kExpLow), x));
    V16 n = vround(vmul(x, vset1(1.44269504088896341f)));
    V16 r = vfnma(n, vset1(0.693145751953125f), x);
    r = vfnma(n, vset1(1.42860682030941723e-6f), r);
    V16 p = vset1(1.0f / 5040);
    p = vfma(p, r, vset1(1.0f / 720));
    p = vfma(p, r, vset1(1.0f / 120));
    p = vfma(p, r, vset1(1.0f / 24));
    p = vfma(p, r, vset1(1.0f / 6));
    p = vfma(p, r, vset1(0.5f));
    p = vfma(p, r, vset1(1.0f));
    p = vfma(p, r, vset1(1.0f));
    return vpow2(p, n);
}

// 2^t for t up to about 0: 2^f on [-0.5, 0.5] by a polynomial fitted with p(0) = 1, relative error below 1e-7.
// A NaN passes through: the clamp returns its second operand.
inline V16 vexp2(V16 t) {
    const V16 shift = vset1(0x1.8p23f);
    t = vmax(vset1(-126.0f), t);  // a denormal would cost a hundred cycles
    const V16 n = vsub(vadd(t, shift), shift), f = vsub(t, n);
    V16 p = vfma(vset1(0x1.5bba14p-10f), f, vset1(0x1.3cea88p-7f));
    p = vfma(p, f, vset1(0x1.c6b752p-5f));
    p = vfma(p, f, vset1(0x1.ebf9bcp-3f));
    p = vfma(p, f, vset1(0x1.62e42ap-1f));
    p = vfma(p, f, vset1(1.0f));
    return vpow2(p, n);
}

// x * sigmoid(x) with the exact quotient.
inline V16 vsilu(V16 x) { return vdiv(x, vadd(vset1(1.0f), vexp(vsub(vzero(), x)))); }

}  // namespace zl
