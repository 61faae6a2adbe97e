// Paged attention of 16 queries at a time over one key-value head, and the writing of new keys and values.
//
// A query row's scores, maximum, exponentials and sum run over the row's pages in order; pages beyond its own end add
// exact zeros. Nothing depends on how many queries share a tile, so decode and prefill give the same bits.
#pragma once
#include <cmath>

#include "attention_amx.hpp"
#include "context.hpp"
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

// Writes tokens [from, from + count) of a page from rows of k and v that lie `stride` apart.
template <class T>
inline void insert(T* page, int head_pad, int from, int count, const T* k, const T* v, size_t stride) {
    T* values = page + (size_t)kPage * head_pad;
    // A fresh page may hold anything, NaN included, and masked slots are multiplied by zero: clear it first.
    if (from == 0) memset(page, 0, (size_t)2 * kPage * head_pad * sizeof(T));
    for (int i = 0; i < count; i++, k += stride, v += stride) {
        const int t = from + i;
        if constexpr (sizeof(T) == 2) {
            for (int d = 0; d < head_pad; d += 2) memcpy(page + k_at<T>(head_pad, d, t), k + d, 4);
        } else {
            for (int d = 0; d < head_pad; d++) page[k_at<T>(head_pad, d, t)] = k[d];
        }
        for (int d = 0; d < head_pad; d++) values[v_at<T>(d, t)] = v[d];
    }
}

// The rows of one tile: queries q[r] (head_pad apart when contiguous) whose last visible token is at end[r] - 1.
template <class T>
struct QueryTile {
    const T* q;
    size_t stride;
    int rows, pages;
    const int32_t* table;
    int end[16];
};

// Requests the blocks that this thread will read next, half a page of a head at a time, in reading order.
template <class T>
struct Ahead {
    const zl_context* c;
    int layer, item, limit, page = 0, n_pages = 0, half = 0;
    const int* segs;

    void enter() {
        if (item >= limit) return;
        const Segment& s = c->at.segs[segs[item / c->n.kv_heads]];
        n_pages = (s.start + s.len + kPage - 1) / kPage;
    }
    void start(int layer_, int item_, int limit_) {
        layer = layer_, item = item_, limit = limit_, page = 0, half = 0;
        enter();
    }
    inline void next() {
        if (item >= limit) return;
        const Segment& s = c->at.segs[segs[item / c->n.kv_heads]];
        const char* p = (const char*)(c->page<T>(layer, c->table(s.row)[page], item % c->n.kv_heads) +
                                      (size_t)half * kPage * c->n.head_pad);
        const int lines = kPage * c->n.head_pad * (int)sizeof(T) / 64;
        for (int i = 0; i < lines; i += 16) prefetch_lines<16, _MM_HINT_T1>(p + i * 64);
        if (half ^= 1) return;
        if (++page < n_pages) return;
        page = 0;
        item++;
        enter();
    }
};

template <class T>
struct Attention {
    zl_context& c;
    const int layer, head_pad, group;
    float* scores;  // [page][row][32]
    T* probs;       // [page][row][32]
    float* sums;    // [row][head_pad]
    T* staged;      // [16][head_pad]
    Ahead<T>* ahead;

    Attention(zl_context& ctx, int layer_, void* scratch, Ahead<T>* ahead_)
        : c(ctx), layer(layer_), head_pad(ctx.n.head_pad), group(ctx.n.group), ahead(ahead_) {
        size_t span = (size_t)round_up(c.n.model_len, kPage) * 16;
        char* p = (char*)scratch;
        scores = (float*)p;
        probs = (T*)(p += Arena::room(span * 4));
        sums = (float*)(p += Arena::room(span * sizeof(T)));
        staged = (T*)(p += Arena::room((size_t)16 * head_pad * 4));
    }

    const T* block(const QueryTile<T>& t, int page, int kv_head) const {
        return c.page<T>(layer, t.table[page], kv_head);
    }

    // scores = q . k for all pages; sums = probs . v.
    void score(const QueryTile<T>& t, int kv_head) {
        const int kt = head_pad / 32;
#ifdef ZL_AMX
        if constexpr (sizeof(T) == 2) {
            amx_scores(kt, t.q, t.stride, t.rows, t.pages, [&](int p) {
                if (ahead) ahead->next();
                return block(t, p, kv_head);
            }, scores);
            return;
        }
#endif
        for (int p = 0; p < t.pages; p++) {
            if (ahead) ahead->next();
            product_tiles<T>(t.rows, 2, t.q, t.stride, 32, block(t, p, kv_head), kTile, (size_t)kt * kTile, kt,
                             scores + (size_t)p * t.rows * 32, 32, false);
        }
    }
    void weigh(const QueryTile<T>& t, int kv_head) {
#ifdef ZL_AMX
        if constexpr (sizeof(T) == 2) {
            amx_weigh(head_pad / 16, probs, t.rows, t.pages, [&](int p) {
                return block(t, p, kv_head) + (size_t)kPage * head_pad;
            }, [&] { if (ahead) ahead->next(); }, sums);
            return;
        }
#endif
        for (int p = 0; p < t.pages; p++) {
            if (ahead) ahead->next();
            product_tiles<T>(t.rows, head_pad / 16, probs + (size_t)p * t.rows * 32, 32, 0,
                             block(t, p, kv_head) + (size_t)kPage * head_pad, 0, kTile, 1, sums, head_pad, p > 0);
        }
    }

    // Turns row r's scores into probs and returns 1 / sum.
    float softmax(const QueryTile<T>& t, int r, float scale) {
        const int own = (t.end[r] + kPage - 1) / kPage, rest = t.end[r] - (own - 1) * kPage;
        const size_t step = (size_t)t.rows * 32;
        float* s = scores + (size_t)r * 32;
        T* e = probs + (size_t)r * 32;
        const V16 low = vset1(-3.0e38f);
        float* last = s + (own - 1) * step;
        vstore(last, vkeep(rest, vload(last), low));
        vstore(last + 16, vkeep(rest - 16, vload(last + 16), low));
        V16 m = low;
        for (int p = 0; p < own; p++) m = vmax(m, vmax(vload(s + p * step), vload(s + p * step + 16)));
        const V16 top = vset1(vhmax(m)), sc = vset1(scale);
        V16 sum = vzero();
        for (int p = 0; p < own; p++) {
            V16 a = vexp(vmul(vsub(vload(s + p * step), top), sc));
            V16 b = vexp(vmul(vsub(vload(s + p * step + 16), top), sc));
            if (p == own - 1) {
                a = vkeep(rest, a, vzero());
                b = vkeep(rest - 16, b, vzero());
            }
            sum = vadd(sum, vadd(a, b));
            vstore_from_float(e + p * step, a);
            vstore_from_float(e + p * step + 16, b);
        }
        for (int p = own; p < t.pages; p++) {
            vstore_from_float(e + p * step, vzero());
            vstore_from_float(e + p * step + 16, vzero());
        }
        return 1.0f / vsum(sum);
    }

    void attend(const QueryTile<T>& t, int kv_head, int token0, int r0) {
        const float scale = 1.0f / sqrtf((float)c.n.head_dim);
        float inverse[16];
        score(t, kv_head);
        for (int r = 0; r < t.rows; r++) inverse[r] = softmax(t, r, scale);
        weigh(t, kv_head);
        const int kt = c.n.kt_attn;
        for (int r = 0; r < t.rows; r++) {
            const V16 inv = vset1(inverse[r]);
            const int token = token0 + (r0 + r) / group, head = kv_head * group + (r0 + r) % group;
            for (int d = 0; d < head_pad; d += 32)
                put((T*)c.act_attn, kt, token, (head * head_pad + d) / 32, vmul(vload(sums + r * head_pad + d), inv),
                    vmul(vload(sums + r * head_pad + d + 16), inv));
        }
    }

    // One token of one segment: writes its key and value, then attends.
    void decode(const Segment& s, int kv_head) {
        const int pos = s.start;
        const size_t own = ((size_t)s.token0 * c.n.kv_heads + kv_head) * head_pad;
        insert<T>(c.page<T>(layer, c.table(s.row)[pos / kPage], kv_head), head_pad, pos % kPage, 1, (const T*)c.k + own,
                  (const T*)c.v + own, 0);
        QueryTile<T> t;
        t.q = (const T*)c.q + ((size_t)s.token0 * c.n.heads + kv_head * group) * head_pad;
        t.stride = head_pad;
        t.rows = group;
        t.pages = pos / kPage + 1;
        t.table = c.table(s.row);
        for (int r = 0; r < group; r++) t.end[r] = pos + 1;
        attend(t, kv_head, s.token0, 0);
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
        insert<T>(c.page<T>(layer, c.table(s.row)[row_page], kv_head), head_pad, begin % kPage, end - begin,
                  (const T*)c.k + own, (const T*)c.v + own, (size_t)c.n.kv_heads * head_pad);
    }
};

}  // namespace zl
