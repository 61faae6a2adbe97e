// The serial head of a step: which segments run, where their tokens lie, what the attention stage will do.
#include <algorithm>
#include <cstring>

#include "context.hpp"

namespace zl {

static bool valid(const zl_context& c, const Segment& s) {
    return s.row >= 0 && s.row < c.n.rows && s.len > 0 && s.start >= 0 && s.start + s.len <= c.n.model_len;
}

// Every page that the segment reads or writes must be one of the pool's.
static bool has_pages(const zl_context& c, const Segment& s) {
    const int32_t* table = c.table(s.row);
    for (int p = 0; p * kPage < s.start + s.len; p++)
        if (p >= c.n.table_width || table[p] < 0 || table[p] >= c.n.pages) return false;
    return true;
}

// Reads a row's prompt from where its pieces lie; false where one is not within the row's own ids or the arena.
static bool gather(const zl_context& c, int row) {
    const zl_columns& col = c.columns;
    const int count = col.n_pieces[row], length = col.prompt_len[row];
    if (count < 0 || count > col.max_pieces || length < 0 || length > c.n.model_len) return false;
    const int32_t *own = col.own_ids + (size_t)row * c.n.model_len, *at = col.piece_at + row * col.max_pieces;
    const int64_t* source = col.piece_source + row * col.max_pieces;
    if (count ? at[0] : length) return false;  // a gap would leave another row's ids
    for (int i = 0; i < count; i++) {
        const int end = i + 1 < count ? at[i + 1] : length;
        const int64_t from = source[i], n = end - at[i];
        if (at[i] < 0 || n < 0 || end > length) return false;
        if (from < 0 ? n > c.n.model_len - ~from : 4 * n > col.arena_bytes - from) return false;
        const void* ids = from < 0 ? (const void*)(own + ~from) : col.arena + from;
        memcpy(c.prompt(row) + at[i], ids, 4 * n);
    }
    return true;
}

static void add_segment(zl_context& c, const Segment& s) {
    Plan& p = c.at;
    const int id = (int)p.segs.size();
    p.segs.push_back(s);
    for (int i = 0; i < s.len; i++) {
        p.pos.push_back(s.start + i);
        p.seg_of.push_back(id);
    }
    if (s.sample) p.samples.push_back(id);
    if (s.len == 1 && c.n.group <= 16) {
        p.decodes.push_back(id);
        return;
    }
    for (int page = s.start / kPage; page * kPage < s.start + s.len; page++) p.fills.emplace_back(id, page);
    for (int r = 0; r < s.len * c.n.group; r += 16) p.tiles.emplace_back(id, r);
}

// The first pages that two decoding rows have in common; never one that either of them writes.
static int common(const zl_context& c, const Segment& a, const Segment& b) {
    const int32_t *x = c.table(a.row), *y = c.table(b.row);
    const int most = std::min(a.start, b.start) / kPage;
    int n = 0;
    while (n < most && x[n] == y[n]) n++;
    return n;
}

// Puts decoding rows that share the same number of first pages beside each other and cuts them into batches of about
// equal size, each for one tile of queries; the batches keep the order of the slot. Few rows are left in smaller ones,
// so that all threads have some.
static void batch(zl_context& c) {
    Plan& p = c.at;
    const int n = (int)p.decodes.size(), each = 4 * c.config.n_threads;
    int most = std::min(16 / c.n.group, std::max(1, n * c.n.kv_heads / each));
#ifdef ZL_AMX
    if (c.n.kv8) most = 1;  // kv8_amx.hpp takes one row
#endif
    auto same = [&](int i, int j) { return common(c, p.segs[p.decodes[i]], p.segs[p.decodes[j]]); };
    if (most > 1)  // by page ids: rows that share more lie nearer
        std::sort(p.decodes.begin(), p.decodes.end(), [&](int i, int j) {
            const Segment &a = p.segs[i], &b = p.segs[j];
            const int at = common(c, a, b);
            if (at == std::min(a.start, b.start) / kPage) return std::make_pair(a.start, i) < std::make_pair(b.start, j);
            return c.table(a.row)[at] < c.table(b.row)[at];
        });
    for (int i = 0, end; i < n; i = end) {
        end = i + 1;
        const int shared = most > 1 && end < n ? same(i, end) : 0;
        if (shared) {
            while (end < n && same(end - 1, end) == shared) end++;
            if (end < n && same(end - 1, end) > shared) end--;  // shares more with those that follow
        }
        std::sort(p.decodes.begin() + i, p.decodes.begin() + end);
        const int parts = (end - i + most - 1) / most;
        for (int k = 0; k < parts; k++) {
            const int first = i + (end - i) * k / parts, last = i + (end - i) * (k + 1) / parts;
            p.batches.push_back({first, last - first, last - first > 1 ? shared : 0});
        }
    }
    std::sort(p.batches.begin(), p.batches.end(),
              [&](const Together& a, const Together& b) { return p.decodes[a.first] < p.decodes[b.first]; });
}

// Where the head product puts what it measures of a row's logits, and what is wanted of them.
static zl_sample_stats measures_of(const zl_context& c, int sample, int row) {
    const zl_columns& col = c.columns;
    float* top = c.stats + (size_t)sample * 3 * c.n.stat_room;
    return {top, top + c.n.stat_room, top + 2 * c.n.stat_room,
            zl_sample_scale(col.temperature[row], col.top_p[row], col.penalty[row]), (col.row_flags[row] & ZL_LOGPROBS) != 0};
}

}  // namespace zl

void zl_context::plan(int slot) {
    const double begun = zl::now_us();
    zl::Plan& p = at;
    for (double& t : times) t = 0;
    p.slot = &slots[slot];
    p.status = ZL_OK;
    p.segs.clear(), p.pos.clear(), p.seg_of.clear(), p.decodes.clear(), p.batches.clear(), p.fills.clear(), p.tiles.clear();
    p.samples.clear(), p.measures.clear();
    sampled.clear();
    const zl_slot& in = *p.slot;
    const int count = in.n_segs[0];
    if (count < 0 || count > n.rows) p.status = ZL_BAD_SEGMENT;
    for (int s = 0; s < count && p.status == ZL_OK; s++) {
        zl::Segment g{s, in.seg_row[s], in.seg_start[s], in.seg_len[s], (int)p.pos.size(),
                      (in.seg_flags[s] & ZL_SAMPLE) != 0, (in.seg_flags[s] & ZL_FIRST) != 0};
        in.out_flags[s] = 0;
        in.out_token[s] = -1;
        in.out_logprob[s] = 0;
        if (!zl::valid(*this, g)) {
            p.status = ZL_BAD_SEGMENT;
        } else if (g.first) {
            if (!zl::gather(*this, g.row)) p.status = ZL_BAD_PROMPT;
            done[g.row] = 0;
        } else if (done[g.row]) {
            in.out_flags[s] = ZL_SKIPPED;
            continue;
        }
        if (p.status == ZL_OK && g.token0 + g.len > n.tokens) p.status = ZL_TOO_MANY_TOKENS;
        if (p.status == ZL_OK && !zl::has_pages(*this, g)) p.status = ZL_BAD_PAGE;
        if (p.status == ZL_OK) zl::add_segment(*this, g);
    }
    if (p.status != ZL_OK) {  // a broken slot computes nothing at all
        p.segs.clear(), p.pos.clear(), p.seg_of.clear(), p.decodes.clear(), p.batches.clear(), p.fills.clear(), p.tiles.clear();
        p.samples.clear();
    }
    zl::batch(*this);
    status[++planned % 8] = p.status;
    for (int id : p.samples) {
        p.measures.push_back(zl::measures_of(*this, (int)sampled.size(), p.segs[id].row));
        sampled.push_back(p.segs[id].slot_index);
    }
    times[zl::kPlan] = zl::now_us() - begun;
    times[zl::kTotal] = begun;  // the start; `work` turns it into a length
}
