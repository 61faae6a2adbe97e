// AMX tile set-up and what is read ahead; empty of tiles on levels without them.
#pragma once
#include "simd.hpp"

namespace zl {

// The bytes that a thread reads next: its range of the matrix at hand, then its range of the one after.
struct Stream {
    const char *end, *next;
    const char* ahead(const char* p, size_t by) const {
        p += by;
        return p < end ? p : next + (p - end);
    }
};

// Sums of a block that wait for `done`. A few of their rows are handed over in each step of the next block's k loop,
// where the vector units are idle.
template <class F>
struct Later {
    F& done;
    int which = 0, m0 = 0, rows = 0, nb = 0;
    alignas(64) float c[2][32 * 32];

    explicit Later(F& f) : done(f) {}
    float* next() { return c[which ^ 1]; }  // where the sums that `put` announces are written
    void put(int m, int n, int block) {
        all();
        which ^= 1, at_ = 0, m0 = m, rows = n, nb = block;
    }
    void some() {
        if (at_ + 2 <= rows) done(m0 + at_, 2, nb, (const float*)c[which] + at_ * 32), at_ += 2;
    }
    void all() {
        if (at_ < rows) done(m0 + at_, rows - at_, nb, (const float*)c[which] + at_ * 32), at_ = rows;
    }

  private:
    int at_ = 0;
};

template <int N, _mm_hint H>
inline void prefetch_lines(const char* p) {
#pragma GCC unroll 64
    for (int i = 0; i < N; i++) _mm_prefetch(p + i * 64, H);
}

#ifdef ZL_AMX
// Live tiles. A core has few physical tiles beyond the architectural ones, and its hyperthreads share them: when the sibling
// (on a shared host, somebody else) uses tiles too, loads and products that find no free one wait for the one before.
// A tile is live once it is written and until it is zeroed or the configuration is loaded. Measured on Emerald Rapids
// by bench/micro/tiles.py, ns a product: sibling quiet 7 at any number; sibling busy 14 with 4 live tiles, 15 with 5, 20
// with 7, 29 with all 8. Hence the right operands take turns in one tile.
//
// Which load. A streaming load (TILELOADDT1) keeps its lines out of the first-level cache, where they would displace what
// is read again soon. It is for what comes by once, or comes round too late to be there still: row tiles beside a panel
// of weights, weights beside few row tiles, pages of keys and values. For what fits the first level it is the wrong one:
// with it on a single row's activation, products on quantised records took a fifth longer.
//
// Tiles 0-5 (sums and left operands) of `rows` rows, 6 and 7 (right operands) of 16; all 64 bytes wide.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// GCC's tile and configuration loads do not tell the compiler that they read memory: stores before them must not move
// past them.
inline void tile_fence() { asm volatile("" ::: "memory"); }

inline void load_config(const TileConfig& t) {
    asm volatile("" ::"r"(&t) : "memory");
    _tile_loadconfig(&t);
}

inline void use_tiles(int n_rows) {
    TileConfig t;
    for (int i = 0; i < 8; i++) {
        t.bytes[i] = 64;
        t.rows[i] = (uint8_t)(i < 6 ? n_rows : 16);
    }
    load_config(t);
}

// Leaves the tile state as other users of the process (oneDNN) expect it.
inline void drop_tiles() { _tile_release(); }
#else
inline void use_tiles(int) {}
inline void drop_tiles() {}
#endif

}  // namespace zl
