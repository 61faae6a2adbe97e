// AMX tile set-up and prefetch helpers; empty of tiles on levels without them.
#pragma once
#include "simd.hpp"

namespace zl {

template <int N, _mm_hint H>
inline void prefetch_lines(const char* p) {
#pragma GCC unroll 64
    for (int i = 0; i < N; i++) _mm_prefetch(p + i * 64, H);
}

#ifdef ZL_AMX
// Tiles 0-5 (sums and left operands) of `rows` rows, 6 and 7 (right operands) of 16; all 64 bytes wide.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// GCC's tile load does not tell the compiler that it reads memory: stores before it must not move past it.
inline void tile_fence() { asm volatile("" ::: "memory"); }

inline void use_tiles(int n_rows) {
    TileConfig t;
    for (int i = 0; i < 8; i++) {
        t.bytes[i] = 64;
        t.rows[i] = (uint8_t)(i < 6 ? n_rows : 16);
    }
    _tile_loadconfig(&t);
}

// Leaves the tile state as other users of the process (oneDNN) expect it.
inline void drop_tiles() { _tile_release(); }
#else
inline void use_tiles(int) {}
inline void drop_tiles() {}
#endif

}  // namespace zl
