// Sixteen float lanes for the sampler on AVX-512, AVX2 and plain C++, in an anonymous namespace: each level that
// sample.cpp is compiled for has its own copy, and nothing of it can be shared at link time.
// Apart from simd.hpp because it needs no instruction set, masks as bits, packing and sums in double.
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

inline double total(const Sum& s) {
    double f[16];
    lanes(s, f);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) f[i] += f[i + half];
    return f[0];
}

}  // namespace
