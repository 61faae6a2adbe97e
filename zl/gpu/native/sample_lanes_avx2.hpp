// The sampler's sixteen lanes in two AVX2 registers. Included by sample_lanes.hpp only, which says what they are.
#pragma once

namespace {

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
template <int Compare>
inline V masked(V d, V edge, V v) {
    return {_mm256_and_ps(_mm256_cmp_ps(d.a, edge.a, Compare), v.a), _mm256_and_ps(_mm256_cmp_ps(d.b, edge.b, Compare), v.b)};
}
inline V above(V d, V edge, V v) { return masked<_CMP_GT_OQ>(d, edge, v); }
inline V not_above(V d, V edge, V v) { return masked<_CMP_NGT_UQ>(d, edge, v); }
inline V not_below(V d, V edge, V v) { return masked<_CMP_GE_OQ>(d, edge, v); }
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
using Ids = V;  // int32 bits
inline Ids ids_from(int32_t first) {
    const __m256i a = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return {_mm256_castsi256_ps(a), _mm256_castsi256_ps(_mm256_add_epi32(a, _mm256_set1_epi32(8)))};
}
inline Ids load_ids(const int32_t* p) {
    return {_mm256_castsi256_ps(_mm256_loadu_si256((const __m256i*)p)),
            _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i*)(p + 8)))};
}
// For each eight bits, the places of those that are set; after them anything.
struct Places {
    uint8_t of[256][8] = {};
    constexpr Places() {
        for (int m = 0; m < 256; m++)
            for (int i = 0, n = 0; i < 8; i++)
                if (m >> i & 1) of[m][n++] = (uint8_t)i;
    }
};
constexpr Places kPlaces;
struct Taken {
    __m256i a, b;
    int n_a, n;
};
inline __m256i places(Mask m) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kPlaces.of[m])); }
inline Taken taken(Mask m) { return {places(m & 255), places(m >> 8), __builtin_popcount(m & 255), __builtin_popcount(m)}; }
inline void pack(const Taken& t, V v, float* to) {
    _mm256_storeu_ps(to, _mm256_permutevar8x32_ps(v.a, t.a));
    _mm256_storeu_ps(to + t.n_a, _mm256_permutevar8x32_ps(v.b, t.b));
}
inline void pack(const Taken& t, Ids v, int32_t* to) {
    _mm256_storeu_si256((__m256i*)to, _mm256_castps_si256(_mm256_permutevar8x32_ps(v.a, t.a)));
    _mm256_storeu_si256((__m256i*)(to + t.n_a), _mm256_castps_si256(_mm256_permutevar8x32_ps(v.b, t.b)));
}

}  // namespace
