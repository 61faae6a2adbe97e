// A model file's quantised blocks, repacked into the tile order, and their unpacking to bf16 in registers.
//
// One record holds 32 k of a block of 32 columns, in the order of two tiles (micro.hpp): the weights that a product
// needs next lie next to each other. An unpacked element is round_to_bf16(float(d * q + m)), where d and m are the
// file's half floats: d * q is exact in float, so one fused multiply-add rounds as the file's readers do, and the
// product sees the very bits that prepacked bf16 weights would hold.
//   kQ4   [2 tiles][256 bytes of nibbles], then [2 tiles][16 d, 16 m]     640 bytes (bf16: 2048)
//         byte 4i + j/2 of each 64 holds, at nibble j of dword i, row j/2 of 4 rows, word (j % 2) * 16 + i
//   kQ8   [2 tiles][16 rows][32 int8], then [2 tiles][16 d]               1088 bytes
#pragma once
#include "micro.hpp"

namespace zl {

enum Kind : uint8_t { kPlain = 0, kQ4 = 1, kQ8 = 2 };

constexpr int kQ4Record = 640, kQ8Record = 1088, kRecordTiles = 2;

inline size_t record_bytes(int kind, size_t elem) {
    return kind == kQ4 ? kQ4Record : kind == kQ8 ? kQ8Record : kRecordTiles * kTile * elem;
}

// A packed matrix: records [n / 32][k / 32].
struct Matrix {
    char* data = nullptr;
    int kind = kPlain;
};

// Up to this many rows a product is bound by the weights' bytes, and unpacking blocks wins; beyond, the plain copy does.
constexpr int kUnpackRows = 32;

// A matrix in the context's dtype, and as blocks where the file has them (kind not 0).
struct Packed {
    Matrix plain, blocks;
    const Matrix& pick(int rows) const { return blocks.kind && rows <= kUnpackRows ? blocks : plain; }
};

#ifdef __AVX512F__
inline V16 half_to_float(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
// Lanes 0 0 1 1 ... 7 7 and 8 8 ... 15 15.
inline V16 twice_low(V16 v) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), v);
}
inline V16 twice_high(V16 v) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), v);
}
using Nibbles = __m512i;
inline Nibbles load_nibbles(const char* p) { return _mm512_loadu_si512(p); }
// Nibble J of each dword as a float: a permutation reads the low four bits of its index and ignores the rest.
template <int J>
inline V16 nibble(Nibbles v) {
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(J ? _mm512_srli_epi32(v, 4 * J) : v, table);
}
inline V16 bytes_to_float(const char* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#else
inline V16 half_to_float(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline V16 twice(__m256 v) {
    return {_mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}
inline V16 twice_low(V16 v) { return twice(v.a); }
inline V16 twice_high(V16 v) { return twice(v.b); }
struct Nibbles {
    __m256i a, b;
};
inline Nibbles load_nibbles(const char* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
template <int J>
inline V16 nibble(Nibbles v) {
    const __m256i low = _mm256_set1_epi32(15);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(v.a, 4 * J), low)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(v.b, 4 * J), low))};
}
inline V16 bytes_to_float(const char* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
#endif

template <int J>
inline void unpack_row(Nibbles v, V16 dl, V16 dh, V16 ml, V16 mh, bf16* out) {
    vstore_pair(out + J * 32, vfma(nibble<2 * J>(v), dl, ml), vfma(nibble<2 * J + 1>(v), dh, mh));
}

template <int kKind>
inline void unpack(const char* record, bf16* out);

template <>
inline void unpack<kQ4>(const char* record, bf16* out) {
    for (int t = 0; t < 2; t++) {
        const uint16_t* scales = (const uint16_t*)(record + 512 + t * 64);
        const V16 d = half_to_float(scales), m = half_to_float(scales + 16);
        const V16 dl = twice_low(d), dh = twice_high(d), ml = twice_low(m), mh = twice_high(m);
        for (int c = 0; c < 4; c++, out += 128) {
            const Nibbles v = load_nibbles(record + t * 256 + c * 64);
            unpack_row<0>(v, dl, dh, ml, mh, out);
            unpack_row<1>(v, dl, dh, ml, mh, out);
            unpack_row<2>(v, dl, dh, ml, mh, out);
            unpack_row<3>(v, dl, dh, ml, mh, out);
        }
    }
}

template <>
inline void unpack<kQ8>(const char* record, bf16* out) {
    for (int t = 0; t < 2; t++) {
        const V16 d = half_to_float((const uint16_t*)(record + 1024 + t * 32));
        const V16 dl = twice_low(d), dh = twice_high(d);
        const char* q = record + t * 512;
        for (int r = 0; r < 16; r++, out += 32, q += 32)
            vstore_pair(out, vmul(bytes_to_float(q), dl), vmul(bytes_to_float(q + 16), dh));
    }
}

}  // namespace zl
