// A model file's quantised blocks, repacked into the tile order, and their unpacking to bf16 in registers.
//
// One record holds 32 k of a block of 32 columns, in the order of two tiles (micro.hpp): the weights that a product
// needs next lie next to each other. An unpacked element is round_to_bf16(float(d * q + m)), where d and m are the
// file's half floats: d * q is exact in float, so one fused multiply-add rounds as the file's readers do, and the
// product sees the very bits that prepacked bf16 weights would hold.
//   kQ4   [2 tiles][256 bytes of nibbles], then [2 tiles][16 d, 16 m]     640 bytes (bf16: 2048)
//   kQ8   [2 tiles][512 int8], then [2 tiles][16 d]                       1088 bytes
// On tiles (AMX) a record's columns become rows of 32 k, elsewhere the tiles of micro.hpp; q4_at and q8_at say where
// an element lies.
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

constexpr int kByRows = 256;  // from here on threads share the rows of a product, not its columns
constexpr int kPanel = 18, kPanelRows = 512;  // records of a block, and rows, that a product takes at a time
constexpr int kRing = 4;  // records that a thread holds unpacked while it multiplies them

// A matrix in the context's dtype, and as blocks where the file has them (kind not 0).
struct Packed {
    Matrix plain, blocks;
    const Matrix& pick(int rows) const { return blocks.kind && rows <= kUnpackRows ? blocks : plain; }
};

// The byte of a record that holds element (k, column) of a tile, and the nibble's shift within it.
#ifdef ZL_AMX
inline int q4_at(int tile, int k, int column) { return tile * 256 + column / 4 * 64 + k * 2 + column % 4 / 2; }
inline int q4_shift(int, int column) { return column % 2 * 4; }
inline int q8_at(int tile, int k, int column) { return tile * 512 + column * 32 + k; }
#else
// Four rows of pairs of k share 64 bytes: nibble j of dword i is row j / 2, word (j % 2) * 16 + i.
inline int q4_at(int tile, int k, int column) {
    return tile * 256 + k / 8 * 64 + (2 * column + k % 2) % 16 * 4 + k / 2 % 4;
}
inline int q4_shift(int, int column) { return column / 8 * 4; }
inline int q8_at(int tile, int k, int column) { return tile * 512 + k / 2 * 32 + 2 * column + k % 2; }
#endif

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

template <int kKind>
inline void unpack(const char* record, bf16* out);

#ifdef ZL_AMX
// A column's 32 values are one lookup of its 16 possible ones: nibbles, as words, index a table of words. The lookup
// reads five bits of its index, so two columns share a table.
template <>
inline void unpack<kQ4>(const char* record, bf16* out) {
    alignas(64) float scales[64];  // by tile: 16 d, 16 m
    for (int i = 0; i < 4; i++) vstore(scales + i * 16, half_to_float((const uint16_t*)(record + 512 + i * 32)));
    const V16 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
    for (int group = 0; group < 8; group++, out += 128) {
        const __m512i nibbles = _mm512_loadu_si512(record + group * 64);
        const float *d = scales + group / 4 * 32 + group % 4 * 4, *m = d + 16;
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const V16 even = vfma(numbers, vset1(d[i]), vset1(m[i]));
            const V16 odd = vfma(numbers, vset1(d[i + 1]), vset1(m[i + 1]));
            const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
            const __m512i at = _mm512_and_si512(i ? _mm512_srli_epi16(nibbles, 8) : nibbles, low);
            const __m512i next = _mm512_srli_epi16(nibbles, 4 * i + 4);
            _mm512_store_si512(out + i * 32, _mm512_permutexvar_epi16(at, table));
            _mm512_store_si512(out + i * 32 + 32,  // (next & low) | upper
                               _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(next, low, upper, 0xea), table));
        }
    }
}

template <>
inline void unpack<kQ8>(const char* record, bf16* out) {
    alignas(64) float d[32];
    for (int i = 0; i < 2; i++) vstore(d + i * 16, half_to_float((const uint16_t*)(record + 1024 + i * 32)));
    for (int column = 0; column < 32; column++, out += 32, record += 32) {
        const V16 scale = vset1(d[column]);
        vstore_pair(out, vmul(bytes_to_float(record), scale), vmul(bytes_to_float(record + 16), scale));
    }
}
#else
template <int J>
inline void unpack_row(Nibbles v, V16 dl, V16 dh, V16 ml, V16 mh, bf16* out) {
    vstore_pair(out + J * 32, vfma(nibble<2 * J>(v), dl, ml), vfma(nibble<2 * J + 1>(v), dh, mh));
}

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
#endif

}  // namespace zl
