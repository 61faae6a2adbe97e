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

}  // namespace

#if defined(__AVX512F__)
#include "sample_lanes_avx512.hpp"
#elif defined(__AVX2__) && defined(__FMA__)
#include "sample_lanes_avx2.hpp"
#else
#include "sample_lanes_plain.hpp"
#endif

namespace {

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
