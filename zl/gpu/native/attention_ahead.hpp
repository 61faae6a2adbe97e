// What decoding rows read ahead from memory: their own pages. Pages that rows share are read by all of them and stay in
// the cache.
#pragma once
#include "context.hpp"
#include "kv8.hpp"
#include "tile.hpp"

namespace zl {

constexpr int kLead = 64 * 1024;  // bytes requested before a thread reads its first item

// Requests the blocks that this thread will read next, in reading order: of each item the keys of all its rows' own
// pages, then the values.
template <class T, bool Kv8>
struct Ahead {
    static constexpr int kLines = Kv8 ? 8 : 16;  // of one tile
    const zl_context* c;
    int layer = 0, item = 0, limit = 0, row = 0, page = 0, n_pages = 0, half = 0, left = 0;
    Together batch{};  // of the item
    const char* at = nullptr;
    const int32_t* table = nullptr;

    void start(int layer_, int item_, int limit_) {
        layer = layer_, item = item_ - 1, limit = limit_, row = 0, page = 0, n_pages = 0, half = 1, left = 0;
        batch = {};
        for (int i = 0; i < kLead / 1024; i++) next();
    }
    // The next page, row, half (keys or values) or item.
    bool enter() {
        if (++page >= n_pages) {
            if (++row >= batch.count) {
                half ^= 1;
                if (half == 0 && !next_item()) return false;
                row = 0;
            }
            page = 0;
            const Segment& s = c->at.segs[c->at.decodes[batch.first + row]];
            n_pages = s.start / kPage + 1 - batch.shared;
            table = c->table(s.row) + batch.shared;
        }
        left = kPage * c->n.head_pad * (Kv8 ? 1 : (int)sizeof(T)) / 64;
        at = (const char*)c->page<T>(layer, table[page], item % c->n.kv_heads) + (size_t)half * left * 64;
        if constexpr (Kv8) {
            if (half == 0) prefetch_lines<2, _MM_HINT_T1>(at);  // scales
            at += kHead8;
        }
        return true;
    }
    bool next_item() {
        if (++item >= limit) {
            item = limit, half = 1, n_pages = 0, batch.count = 0;  // the next call stops here again
            return false;
        }
        batch = c->at.batches[item / c->n.kv_heads];
        return true;
    }
    // One tile more.
    inline void next() {
        if (left == 0 && !enter()) return;
        prefetch_lines<kLines, _MM_HINT_T1>(at);
        at += kLines * 64;
        left -= kLines;
    }
};

}  // namespace zl
