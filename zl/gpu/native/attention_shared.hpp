// Attention of decoding rows that share their first pages: the queries of several rows meet each shared page in one tile,
// then each row goes on over its own pages.
//
// A row's bits are those that it has alone. Its maxima are taken of the shared pages' scores, then of its own, before any
// exponential; its exponentials' sum and its weighted sums are each one chain over the pages in order, kept in float
// between the shared ones and its own, which is what a tile holds. A tile's rows know nothing of each other.
#pragma once
#include "attention.hpp"

namespace zl {

template <class T, bool Kv8>
struct SharedAttention : Attention<T, Kv8> {
    using Base = Attention<T, Kv8>;
    using Base::c, Base::group, Base::head_pad, Base::staged;

    using Base::Base;

    // The tokens of a batch: writes their keys and values, then attends.
    void decode(const Together& b, int kv_head) {
        b.count == 1 ? Base::decode(segment(b, 0), kv_head) : together(b, kv_head);
    }

  private:
    const Segment& segment(const Together& b, int i) const { return c.at.segs[c.at.decodes[b.first + i]]; }

    __attribute__((noinline)) void together(const Together& b, int kv_head) {
        QueryTile<T> all = this->queries(segment(b, 0), kv_head, 0), own[16];
        all.q = staged;
        all.rows = b.count * group;
        all.pages = b.shared;
        for (int r = 0; r < all.rows; r++) all.end[r] = b.shared * kPage;
        size_t kept = (size_t)all.rows * b.shared * 32;
        this->n_own = 0;
        for (int i = 0; i < b.count; i++) {
            QueryTile<T>& t = own[i] = this->queries(segment(b, i), kv_head, b.shared);
            memcpy(staged + (size_t)i * group * head_pad, t.q, (size_t)group * head_pad * sizeof(T));
            t.at = i * group;
            t.kept = kept;
            t.goes_on = true;
            kept += (size_t)group * t.pages * 32;
            this->n_own += t.pages;
        }
        this->n_all = this->n_own + b.shared;
        for (int i = 0; i < b.count; i++) this->put_token(segment(b, i), kv_head);

        this->begin(all.rows);
        use_tiles(all.rows);
        this->score(all, kv_head);
        use_tiles(group);
        for (int i = 0; i < b.count; i++) this->score(own[i], kv_head);
        this->settle(all.rows);
        use_tiles(all.rows);
        this->weigh(all, kv_head);
        use_tiles(group);
        for (int i = 0; i < b.count; i++) {
            this->weigh(own[i], kv_head);
            for (int r = 0; r < group; r++) this->hand_on(own[i].at + r, segment(b, i).token0, kv_head * group + r);
        }
    }
};

}  // namespace zl
