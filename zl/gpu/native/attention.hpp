// Paged attention of 16 queries at a time over one key-value head, and the writing of new keys and values.
//
// A query row's scores, maximum, exponentials and sum run over the row's pages in order; pages beyond its own end add
// exact zeros. Nothing depends on how many queries share a tile, so decode and prefill give the same bits.
#pragma once
#include <cmath>

#include "attention_ahead.hpp"
#include "attention_amx.hpp"
#include "context.hpp"
#include "kv8.hpp"
#include "kv8_amx.hpp"
#include "micro.hpp"
#include "rows.hpp"
#include "tile.hpp"

namespace zl {

// Element (dim, token) of a K block and (token, dim) of a V block.
template <class T>
inline size_t in_tile(int k, int n) {
    return sizeof(T) == 2 ? (size_t)(k >> 1) * 32 + n * 2 + (k & 1) : (size_t)k * 16 + n;
}
template <class T>
inline size_t k_at(int head_pad, int dim, int token) {
    return (size_t)((token >> 4) * (head_pad / 32) + (dim >> 5)) * kTile + in_tile<T>(dim & 31, token & 15);
}
template <class T>
inline size_t v_at(int dim, int token) {
    return (size_t)(dim >> 4) * kTile + in_tile<T>(token, dim & 15);
}

// Keys of the token t, of sixteen tokens from t on; values of one token, of two.
template <class T>
inline void insert_key(T* page, int head_pad, int t, const T* k) {
    if constexpr (sizeof(T) == 2)
        for (int d = 0; d < head_pad; d += 2) memcpy(page + k_at<T>(head_pad, d, t), k + d, 4);
    else
        for (int d = 0; d < head_pad; d++) page[k_at<T>(head_pad, d, t)] = k[d];
}
inline void insert_keys(bf16* page, int head_pad, int t, const bf16* k, int stride) {
    for (int d = 0; d < head_pad; d += 2) vcollect_pairs(page + k_at<bf16>(head_pad, d, t), k + d, stride);
}
template <class T>
inline void insert_value(T* values, int head_pad, int t, const T* v) {
    for (int d = 0; d < head_pad; d++) values[v_at<T>(d, t)] = v[d];
}
inline void insert_values(bf16* values, int head_pad, int t, const bf16* v, int stride) {
    for (int d = 0; d < head_pad; d += 16) vinterleave(values + v_at<bf16>(d, t), v + d, v + stride + d);
}

// Writes tokens [from, from + count) of a page from rows of k and v that lie `stride` apart.
template <class T>
inline void insert(T* page, int head_pad, int from, int count, const T* k, const T* v, int stride) {
    T* values = page + (size_t)kPage * head_pad;
    // A fresh page may hold anything, NaN included, and masked slots are multiplied by zero: clear it first.
    if (from == 0 && count < kPage) memset(page, 0, (size_t)2 * kPage * head_pad * sizeof(T));
    const int end = from + count;
    for (int t = from; t < end; t++, k += stride) {
        if constexpr (sizeof(T) == 2) {
            if (t % 16 == 0 && t + 16 <= end) {
                insert_keys(page, head_pad, t, k, stride);
                t += 15, k += 15 * stride;
                continue;
            }
        }
        insert_key(page, head_pad, t, k);
    }
    for (int t = from; t < end; t++, v += stride) {
        if constexpr (sizeof(T) == 2) {
            if (t % 2 == 0 && t + 2 <= end) {
                insert_values(values, head_pad, t, v, stride);
                t++, v += stride;
                continue;
            }
        }
        insert_value(values, head_pad, t, v);
    }
}

// The rows of one tile: queries q[r] (head_pad apart when contiguous) whose last visible token is at end[r] - 1, counted
// from the first of its pages. Where these go on behind others, `at` and `kept` say where what came before lies.
template <class T>
struct QueryTile {
    const T* q;
    size_t stride;
    int rows, pages;
    const int32_t* table;
    int end[16];
    int at = 0;            // the place of row 0 in peak, total, top and sums
    size_t kept = 0;       // of its scores and probs
    bool goes_on = false;  // the sums of earlier pages are there already
};

template <class T, bool Kv8>
struct Attention {
    zl_context& c;
    const int layer, head_pad, group;
    float* scores;  // [page][row][32]
    T* probs;       // [page][row][32]
    float* sums;    // [row][head_pad]
    T* staged;      // [16][head_pad]
    Ahead<T, Kv8>* ahead;  // of single tokens; null for longer segments
    char* const room8;     // see kv8.hpp
    const V16 rate;                                   // log2(e) / sqrt(head_dim)
    alignas(64) float peak[16 * 16], total[16 * 16];  // [row][lane]: the largest score, the exponentials' sum
    float top[16];                                    // a row's largest score, times rate
    int n_own = 1, n_all = 1, due = 0;                // of the item at hand: its own pages, all that it reads; see `request`
    alignas(64) float scales[2 * kPage];              // of the page that `block` gave: keys, values

    Attention(zl_context& ctx, int layer_, void* scratch, Ahead<T, Kv8>* ahead_)
        : c(ctx), layer(layer_), head_pad(ctx.n.head_pad), group(ctx.n.group), ahead(ahead_),
          room8((char*)scratch + ctx.room8_at()), rate(vset1(1.44269504088896341f / sqrtf((float)ctx.n.head_dim))) {
        size_t span = (size_t)round_up(c.n.model_len, kPage) * 16;
        char* p = (char*)scratch;
        scores = (float*)p;
        probs = (T*)(p += Arena::room(span * 4));
        sums = (float*)(p += Arena::room(span * sizeof(T)));
        staged = (T*)(p += Arena::room((size_t)16 * head_pad * 4));
    }

    // The keys (half 0) or values (1) of a page. Of eight bits they are made here, and their scales read.
    const T* block(const QueryTile<T>& t, int page, int kv_head, int half) {
        const T* at = c.page<T>(layer, t.table[page], kv_head);
        const size_t by = half * (size_t)kPage * head_pad;
        if constexpr (Kv8) {
            read_scales((const int8_t*)at, scales);
            read_scales((const int8_t*)at + kScaleBytes, scales + kPage);
            widen_half((const int8_t*)at + kHead8 + by, head_pad, (T*)room8);
            return (const T*)room8;
        } else {
            return at + by;
        }
    }
    // Multiplies values of a page's 32 tokens by the scales of its keys or values.
    inline void scaled(int half, V16& a, V16& b) const {
        if constexpr (Kv8) {
            const float* by = scales + half * kPage;
            a = vmul(a, vload(by)), b = vmul(b, vload(by + 16));
        }
    }

    // Takes rows [r0, r1) of page p's scores into the maxima. Slots from a row's end on are out of it.
    inline void see(const QueryTile<T>& t, int p, int r0, int r1) {
        const float* s = scores + t.kept + ((size_t)p * t.rows + r0) * 32;
        const V16 low = vset1(-3.0e38f);
        const bool whole = t.end[0] >= (p + 1) * kPage;  // of all rows: ends never fall
        for (int r = r0; r < r1; r++, s += 32) {
            V16 a = vload(s), b = vload(s + 16);
            scaled(0, a, b);
            if (!whole) {
                a = vkeep(t.end[r] - p * kPage, a, low);
                b = vkeep(t.end[r] - p * kPage - 16, b, low);
            }
            float* most = peak + (t.at + r) * 16;
            vstore(most, vmax(vload(most), vmax(a, b)));
        }
    }
    // Turns rows [r0, r1) of page p's scores into probs and adds them to the totals.
    inline void exponentials(const QueryTile<T>& t, int p, int r0, int r1) {
        const float* s = scores + t.kept + ((size_t)p * t.rows + r0) * 32;
        T* e = probs + t.kept + ((size_t)p * t.rows + r0) * 32;
        const bool whole = t.end[0] >= (p + 1) * kPage;
        for (int r = r0; r < r1; r++, s += 32, e += 32) {
            const V16 from = vset1(top[t.at + r]);
            V16 a = vload(s), b = vload(s + 16);
            scaled(0, a, b);
            a = vexp2(vfms(a, rate, from)), b = vexp2(vfms(b, rate, from));
            V16 x = a, y = b;
            scaled(1, x, y);
            if (!whole) {
                const int n = t.end[r] - p * kPage;
                a = vkeep(n, a, vzero()), b = vkeep(n - 16, b, vzero());
                x = vkeep(n, x, vzero()), y = vkeep(n - 16, y, vzero());
            }
            float* sum = total + (t.at + r) * 16;
            vstore(sum, vadd(vload(sum), vadd(a, b)));
            vstore_pair(e, x, y);
        }
    }

    // Before the first and after the last page's scores of rows [0, rows).
    void begin(int rows) {
        for (int r = 0; r < rows; r++) vstore(peak + r * 16, vset1(-3.0e38f));
    }
    void settle(int rows) {
        for (int r = 0; r < rows; r++) {
            top[r] = vhmax(vmul(vload(peak + r * 16), rate));
            vstore(total + r * 16, vzero());
        }
    }

    // Called once a tile of keys or values: requests so many tiles that over an item, its own pages are replaced by as
    // many. Requests without rest behind shared pages would run ahead further than the cache reaches.
    inline void request() {
        if (!ahead) return;
        if (n_own != n_all) {
            if ((due += n_own) < n_all) return;
            due -= n_all;
        }
        ahead->next();
    }

    // scores = q . k for all pages. A page's maxima are taken among the tile loads of the next one. This and `weigh` are
    // inlined wherever they are called: a row alone takes 4% longer through one shared copy of them.
    __attribute__((always_inline)) void score(const QueryTile<T>& t, int kv_head) {
        const int kt = head_pad / 32;
        float* out = scores + t.kept;
#ifdef ZL_AMX
        if constexpr (sizeof(T) == 2) {
            amx_scores(kt, t.q, t.stride, t.rows, t.pages, [&](int p) { return block(t, p, kv_head, 0); }, [&](int p, int i) {
                request();
                if (p) see(t, p - 1, t.rows * i / (2 * kt), t.rows * (i + 1) / (2 * kt));
            }, out);
            see(t, t.pages - 1, 0, t.rows);
            return;
        }
#endif
        for (int p = 0; p < t.pages; p++) {
            product_tiles<T>(t.rows, 2, t.q, t.stride, 32, block(t, p, kv_head, 0), kTile, (size_t)kt * kTile, kt,
                             out + (size_t)p * t.rows * 32, 32, false);
            see(t, p, 0, t.rows);
        }
    }
    // sums = probs . v, from zero or from what they are. A page's exponentials are taken among the tile loads of the one before.
    __attribute__((always_inline)) void weigh(const QueryTile<T>& t, int kv_head) {
        const T* from = probs + t.kept;
        float* out = sums + (size_t)t.at * head_pad;
        const int n = head_pad / 16, parts = n < 4 ? n : 4;
#ifdef ZL_AMX
        if constexpr (sizeof(T) == 2) {
            exponentials(t, 0, 0, t.rows);
            amx_weigh(n, from, t.rows, t.pages, [&](int p) { return block(t, p, kv_head, 1); }, [&](int p, int i) {
                request();
                if (i < parts && p + 1 < t.pages) exponentials(t, p + 1, t.rows * i / parts, t.rows * (i + 1) / parts);
            }, out, t.goes_on);
            return;
        }
#endif
        for (int p = 0; p < t.pages; p++) {
            const T* values = block(t, p, kv_head, 1);
            exponentials(t, p, 0, t.rows);
            product_tiles<T>(t.rows, n, from + (size_t)p * t.rows * 32, 32, 0, values, 0, kTile, 1, out, head_pad,
                             t.goes_on || p > 0);
        }
    }

    int tile_rows() const { return ahead ? group : 16; }
    void set_tiles() const {
#ifdef ZL_AMX
        if constexpr (Kv8) return use_tiles8(tile_rows());
#endif
        use_tiles(tile_rows());
    }

    // Leaves weighted sums of the values in `sums` and the exponentials' sums in `total`.
    void products(const QueryTile<T>& t, int kv_head) {
#ifdef ZL_AMX
        if constexpr (Kv8) {
            auto page = [&](int p) { return (const int8_t*)c.page<T>(layer, t.table[p], kv_head); };
            auto next = [&] { request(); };
            Eight<QueryTile<T>, decltype(page), decltype(next)> eight(t, head_pad, rate, page, next, room8);
            eight.scores = scores, eight.bytes = (uint8_t*)probs;
            eight.peak = peak, eight.total = total, eight.top = top;
            one_tile(tile_rows()) ? eight.template run<1>(sums) : eight.template run<2>(sums);
        } else
#endif
        {
            begin(t.rows);
            score(t, kv_head);
            settle(t.rows);
            weigh(t, kv_head);
        }
    }

    // Divides row r of the sums by its total and hands it on.
    inline void hand_on(int r, int token, int head) {
        const V16 inv = vset1(1.0f / vsum(vload(total + r * 16)));
        for (int d = 0; d < head_pad; d += 32)
            put((T*)c.act_attn, c.n.kt_attn, token, (head * head_pad + d) / 32, vmul(vload(sums + r * head_pad + d), inv),
                vmul(vload(sums + r * head_pad + d + 16), inv));
    }
    void attend(const QueryTile<T>& t, int kv_head, int token0, int r0) {
        products(t, kv_head);
        for (int r = 0; r < t.rows; r++) hand_on(r, token0 + (r0 + r) / group, kv_head * group + (r0 + r) % group);
    }

    void put_tokens(const Segment& s, int row_page, int kv_head, int from, int count, size_t own, int stride) {
        T* page = c.page<T>(layer, c.table(s.row)[row_page], kv_head);
        const T *k = (const T*)c.k + own, *v = (const T*)c.v + own;
        if constexpr (Kv8)
            insert8((int8_t*)page, head_pad, from, count, k, v, stride);
        else
            insert<T>(page, head_pad, from, count, k, v, stride);
    }

    // Writes the key and value of a segment of one token.
    void put_token(const Segment& s, int kv_head) {
        const size_t own = ((size_t)s.token0 * c.n.kv_heads + kv_head) * head_pad;
        put_tokens(s, s.start / kPage, kv_head, s.start % kPage, 1, own, 0);
    }
    // The queries of a segment of one token over its pages from `first` on.
    QueryTile<T> queries(const Segment& s, int kv_head, int first) const {
        QueryTile<T> t;
        t.q = (const T*)c.q + ((size_t)s.token0 * c.n.heads + kv_head * group) * head_pad;
        t.stride = head_pad;
        t.rows = group;
        t.pages = s.start / kPage + 1 - first;
        t.table = c.table(s.row) + first;
        for (int r = 0; r < group; r++) t.end[r] = s.start + 1 - first * kPage;
        return t;
    }
    void decode(const Segment& s, int kv_head) {
        n_own = n_all = 1;
        put_token(s, kv_head);
        attend(queries(s, kv_head, 0), kv_head, s.token0, 0);
    }

    // Rows [r0, r0 + 16) of a longer segment, row r being token r / group and head r % group of the kv head's group.
    void tile(const Segment& s, int kv_head, int r0) {
        QueryTile<T> t;
        t.rows = s.len * group - r0 < 16 ? s.len * group - r0 : 16;
        for (int r = 0; r < t.rows; r++) {
            const int token = (r0 + r) / group, head = kv_head * group + (r0 + r) % group;
            memcpy(staged + (size_t)r * head_pad, (const T*)c.q + ((size_t)(s.token0 + token) * c.n.heads + head) * head_pad,
                   head_pad * sizeof(T));
            t.end[r] = s.start + token + 1;
        }
        t.q = staged;
        t.stride = head_pad;
        t.pages = (t.end[t.rows - 1] + kPage - 1) / kPage;
        t.table = c.table(s.row);
        attend(t, kv_head, s.token0, r0);
    }

    // The part of a longer segment that lies on one page of its row.
    void fill(const Segment& s, int row_page, int kv_head) {
        const int begin = s.start > row_page * kPage ? s.start : row_page * kPage;
        const int end = s.start + s.len < (row_page + 1) * kPage ? s.start + s.len : (row_page + 1) * kPage;
        const size_t own = ((size_t)(s.token0 + begin - s.start) * c.n.kv_heads + kv_head) * head_pad;
        put_tokens(s, row_page, kv_head, begin % kPage, end - begin, own, c.n.kv_heads * head_pad);
    }
};

}  // namespace zl
