// The sampler's sixteen lanes in plain C++, for any processor. Included by sample_lanes.hpp only, which says what they are.
#pragma once

namespace {

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
inline V above(V d, V edge, V v) {
    return each([&](int i) { return d.f[i] > edge.f[i] ? v.f[i] : 0.0f; });
}
inline V not_above(V d, V edge, V v) {
    return each([&](int i) { return d.f[i] > edge.f[i] ? 0.0f : v.f[i]; });
}
inline V not_below(V d, V edge, V v) {
    return each([&](int i) { return d.f[i] >= edge.f[i] ? v.f[i] : 0.0f; });
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
struct Taken {
    Mask m;
    int n;
};
inline Taken taken(Mask m) { return {m, __builtin_popcount(m)}; }
inline void pack(Taken t, const V& v, float* to) {
    for (Mask m = t.m; m; m &= m - 1) *to++ = v.f[__builtin_ctz(m)];
}
inline void pack(Taken t, const Ids& v, int32_t* to) {
    for (Mask m = t.m; m; m &= m - 1) *to++ = v.i[__builtin_ctz(m)];
}

}  // namespace
