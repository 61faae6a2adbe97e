// Matrix products of an activation with packed records of 32 columns by 32 k, on tiles (AMX) or vectors.
// Each output element is one chain over k in order at every row count, so rows never depend on each other; quantised
// records are unpacked to the bf16 values that a plain record would hold, so the kind changes no bit either.
#pragma once
#include "gemm_blocks.hpp"

namespace zl {

// A block of 32 columns, and its rows [r0, r1): r0 is a multiple of 32, and all rows unless the records are plain.
struct Part {
    int nb, r0, r1;
};

template <int kKind, class T, class F>
inline void vector_gemm(const T* a, int kt, const Matrix& b, const Part& part, T* room, F&& done) {
    alignas(64) float c[16 * 32];
    const size_t record = record_bytes(kKind, sizeof(T));
    const char* at = b.data + (size_t)part.nb * kt * record;
    const T* block = (const T*)at;
    if constexpr (kKind != kPlain) {
        for (int k = 0; k < kt; k++) unpack<kKind>(at + k * record, room + (size_t)k * 2 * kTile);
        block = room;
    }
    for (int r = part.r0; r < part.r1; r += 16) {
        const int rows = part.r1 - r < 16 ? part.r1 - r : 16;
        const T* rows_of = a + (size_t)(r / 16) * kt * kTile;
        product_tiles<T>(rows, 2, rows_of, 32, kTile, block, 2 * kTile, kTile, kt, c, 32, false);
        done(r, rows, part.nb, (const float*)c);
    }
}

#ifdef ZL_AMX
// c[16 kRows][32] = kRows row tiles times a block of plain records. each(k) runs behind the products of step k.
// Seven tiles, not eight: see tile.hpp on live tiles.
template <int kRows, class Each>
inline void amx_block(const bf16* a0, const bf16* a1, const bf16* b, int kt, Each&& each, float* c) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kRows > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < kt; k++, b += 2 * kTile) {
        _tile_stream_loadd(6, b, 64);
        _tile_loadd(4, a0 + (size_t)k * kTile, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kRows > 1) {
            _tile_loadd(5, a1 + (size_t)k * kTile, 64);
            _tile_dpbf16ps(2, 5, 6);
        }
        _tile_stream_loadd(6, b + kTile, 64);
        _tile_dpbf16ps(1, 4, 6);
        if constexpr (kRows > 1) _tile_dpbf16ps(3, 5, 6);
        each(k);
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    if constexpr (kRows > 1) {
        _tile_stored(2, c + 512, 128);
        _tile_stored(3, c + 512 + 16, 128);
    }
}

// Up to two row tiles, plain records: they stream by, `ahead` bytes of them requested in advance. The row tiles stay.
template <class F>
inline void amx_stream(const bf16* a, int m, int kt, const Matrix& b, int nb, const Stream& s, Later<F>& later) {
    constexpr size_t record = 4 * kTile, ahead = 16384;
    const char* block = b.data + (size_t)nb * kt * record;
    auto each = [&](int k) {
        prefetch_lines<record / 64, _MM_HINT_T1>(s.ahead(block + k * record, ahead));
        later.some();
    };
    if (m <= 16) amx_block<1>(a, nullptr, (const bf16*)block, kt, each, later.next());
    else amx_block<2>(a, a + (size_t)kt * kTile, (const bf16*)block, kt, each, later.next());
    later.put(0, m, nb);
}

// to[16][32] = one row tile times n records of a block, on top of c[16][32] unless `fresh`. Four tiles are live.
template <class Each>
inline void amx_panel(const bf16* a, const bf16* b, int n, bool fresh, const float* c, float* to, Each&& each) {
    tile_fence();  // the tile loads see what was stored last
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
    } else {
        _tile_loadd(0, c, 128);
        _tile_loadd(1, c + 16, 128);
    }
    for (int k = 0; k < n; k++, a += kTile, b += 2 * kTile) {
        _tile_loadd(6, b, 64);
        _tile_stream_loadd(5, a, 64);
        _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(6, b + kTile, 64);
        _tile_dpbf16ps(1, 5, 6);
        _tile_zero(5);  // not live until the next step
        _tile_zero(6);
        each(k);
    }
    _tile_stored(0, to, 128);
    _tile_stored(1, to + 16, 128);
}

// More rows, plain records: a panel of the block, small enough to stay in the first-level cache (48 KiB on CPUs with AMX
// so far), meets all row tiles, whose sums wait in `sums` for the next panel. The next block is fetched piecewise meanwhile.
template <class F>
inline void amx_reuse(const bf16* a, int kt, const Matrix& b, const Part& part, const Stream& s, float* sums, Later<F>& later) {
    const int panels = (kt + kPanel - 1) / kPanel, per_panel = (kt + panels - 1) / panels;
    const bf16* block = (const bf16*)b.data + (size_t)part.nb * kt * 2 * kTile;
    const char* next = s.ahead((const char*)block, (size_t)kt * 4 * kTile);
    for (int r0 = part.r0; r0 < part.r1; r0 += kPanelRows) {
        const int rows = part.r1 - r0 < kPanelRows ? part.r1 - r0 : kPanelRows, tiles = (rows + 15) / 16;
        const int lines = r0 == part.r0 ? (32 + tiles - 1) / tiles : 0;  // a step fetches so many
        for (int k0 = 0; k0 < kt; k0 += per_panel) {
            const int n = kt - k0 < per_panel ? kt - k0 : per_panel;
            const bool last = k0 + n == kt;
            for (int t = 0; t < tiles; t++) {
                const char* fetch = next + ((size_t)k0 * tiles + (size_t)t * n) * lines * 64;
                auto each = [&](int k) {
                    for (int i = 0; i < lines; i++) _mm_prefetch(fetch + (size_t)(k * lines + i) * 64, _MM_HINT_T1);
                    later.some();
                };
                float* c = sums + (size_t)t * 512;
                amx_panel(a + ((size_t)(r0 / 16 + t) * kt + k0) * kTile, block + (size_t)k0 * 2 * kTile, n, k0 == 0, c,
                          last ? later.next() : c, each);
                if (last) later.put(r0 + t * 16, rows - t * 16 < 16 ? rows - t * 16 : 16, part.nb);
            }
        }
    }
}

template <int kKind, class F>
inline void amx_gemm(const bf16* a, int m, int kt, const Matrix& b, const Part& part, const Stream& s, bf16* room,
                     Later<F>& later) {
    if constexpr (kKind != kPlain) return amx_blocks<kKind>(a, m, kt, b, part.nb, s, room, later);
    if (m <= 32) amx_stream(a, m, kt, b, part.nb, s, later);
    else amx_reuse(a, kt, b, part, s, (float*)room, later);
}
#endif

// How a product is cut into work items: a block of columns and a part of the rows each.
// Of few rows a thread has its own columns, so that the weights are read once; the parts (of at least 64 rows, since each
// reads its block anew) only give enough items for the threads to end together. Of many rows a thread has its own rows:
// it then finds in its own cache what it wrote in the stage before.
struct Split {
    int rows, blocks, parts, each;
    bool by_rows;

    Split(int m, int n_blocks, int kind, int n_threads) : rows(m), blocks(n_blocks), by_rows(kind == kPlain && m >= kByRows) {
        constexpr int kItems = 8;  // a thread
        const int want = by_rows ? n_threads : (kItems * n_threads + blocks - 1) / blocks, most = kind == kPlain ? m / 64 : 1;
        parts = want < most ? want : most > 1 ? most : 1;
        each = ((m + parts - 1) / parts + 31) / 32 * 32;
    }
    Part at(int item) const {
        const int r = (by_rows ? item / blocks : item % parts) * each, nb = by_rows ? item % blocks : item / parts;
        return {nb, r < rows ? r : rows, r + each < rows ? r + each : rows};
    }
    // The block behind those of the items up to `limit`.
    int end_block(int limit) const { return by_rows ? blocks : (limit + parts - 1) / parts; }
};

// What a thread does before its blocks of one product: sets the tiles, and gives the activation as gemm takes it, in
// `room` if it must be turned.
template <class T>
inline const T* ready(const T* a, int m, int kt, const Matrix& b, T* room) {
#ifdef ZL_AMX
    if constexpr (sizeof(T) == 2)
        if (b.kind != kPlain) {
            use_block_tiles(m);
            return right_operand(a, m, kt, room + kRing * 2 * kTile);
        }
#endif
    (void)kt, (void)b, (void)room;
    use_tiles(m < 16 ? m : 16);
    return a;
}

// A part of a [m, 32 * kt] activation, made `ready`, times a packed matrix. later.done(m0, rows, nb, c) gets up to 32
// rows of float c[.][32]; the last of them come when the caller ends with later.all(). Quantised records take
// m <= kUnpackRows. room: this thread's own, the same as for `ready`.
template <int kKind, class T, class F>
inline void gemm_of(const T* a, int m, int kt, const Matrix& b, const Part& part, const Stream& s, T* room,
                    Later<F>& later) {
#ifdef ZL_AMX
    if constexpr (sizeof(T) == 2) return amx_gemm<kKind>(a, m, kt, b, part, s, room, later);
#endif
    (void)m, (void)s;
    vector_gemm<kKind>(a, kt, b, part, room, later.done);
}
template <class T, class F>
inline void gemm(const T* a, int m, int kt, const Matrix& b, const Part& part, const Stream& s, T* room,
                 Later<F>& later) {
    if constexpr (sizeof(T) == 2) {
        if (b.kind == kQ4) return gemm_of<kQ4>(a, m, kt, b, part, s, room, later);
        if (b.kind == kQ8) return gemm_of<kQ8>(a, m, kt, b, part, s, room, later);
    }
    gemm_of<kPlain>(a, m, kt, b, part, s, room, later);
}

}  // namespace zl
