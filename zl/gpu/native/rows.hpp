// What happens to one row between the products: embedding, norm, rotation, activation. All of it row by row in a
// fixed order.
#pragma once
#include <cmath>

#include "context.hpp"
#include "micro.hpp"

namespace zl {

// The 32 values of row r, k tile kt, of an activation with n_kt k tiles.
template <class T>
inline T* row_of(T* a, int n_kt, int r, int kt) {
    return a + ((size_t)(r >> 4) * n_kt + kt) * kTile + (r & 15) * 32;
}
template <class T>
inline void put(T* a, int n_kt, int r, int kt, V16 lo, V16 hi) {
    vstore_pair(row_of(a, n_kt, r, kt), lo, hi);
}
// Writes 16 values: half of a k tile.
template <class T>
inline void put_half(T* a, int n_kt, int r, int half_tile, V16 v) {
    vstore_from_float(a + ((size_t)(r >> 4) * n_kt + half_tile / 2) * kTile + (r & 15) * 32 + (half_tile & 1) * 16, v);
}

template <class T>
inline void embed_row(const T* embed, int id, int n, float* x) {
    const T* e = embed + (size_t)id * n;
    for (int i = 0; i < n; i += 16) vstore(x + i, vload_as_float(e + i));
}

// x * rsqrt(mean(x^2) + eps) * weight into activation row r. The padding of x and weight is zero.
template <class T>
inline void norm_row(const float* x, const float* weight, int n, int n_pad, float eps, T* a, int r) {
    V16 s0 = vzero(), s1 = vzero();
    for (int i = 0; i < n_pad; i += 32) {
        V16 u = vload(x + i), v = vload(x + i + 16);
        s0 = vfma(u, u, s0);
        s1 = vfma(v, v, s1);
    }
    const V16 scale = vset1(1.0f / sqrtf(vsum(vadd(s0, s1)) / (float)n + eps));
    for (int i = 0; i < n_pad; i += 32) {
        V16 u = vmul(vmul(vload(x + i), scale), vload(weight + i));
        V16 v = vmul(vmul(vload(x + i + 16), scale), vload(weight + i + 16));
        put(a, n_pad / 32, r, i / 32, u, v);
    }
}

// The half rotation of transformers: lo' = lo cos - hi sin, hi' = hi cos + lo sin.
inline void rotate(V16& lo, V16& hi, V16 cos, V16 sin) {
    V16 a = vfms(lo, cos, vmul(hi, sin));
    hi = vfma(hi, cos, vmul(lo, sin));
    lo = a;
}

}  // namespace zl
