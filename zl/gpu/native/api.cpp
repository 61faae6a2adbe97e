// The C entry points that are not packing. See api.h.
#include "api.h"

#include <new>

#include "attention.hpp"
#include "context.hpp"

zl_context* zl_open(const zl_config* config, const zl_columns* columns, const zl_slot* slots) {
    if (config->n_threads < 1 || config->n_threads > zl::kMaxThreads) return nullptr;
    zl_context* c = nullptr;
    try {  // no exception may cross the C interface
        c = new zl_context(*config, *columns, slots);
        if (c->allocate()) return c;
    } catch (const std::bad_alloc&) {
    }
    delete c;
    return nullptr;
}

int zl_count(const zl_config* config, size_t* out) {
    if (config->n_threads < 1 || config->n_threads > zl::kMaxThreads) return 0;
    try {
        const zl_slot slots[2] = {};
        zl_context c(*config, zl_columns{}, slots);
        c.weights.counting = c.pool.counting = c.scratch.counting = true;
        if (!c.allocate()) return 0;
        out[0] = c.weights.size, out[1] = c.pool.size, out[2] = c.scratch.size;
        return 1;
    } catch (const std::bad_alloc&) {
        return 0;
    }
}

int zl_start(zl_context* c) {
    const int parts = 64;
    zl::scatter(c->config.n_threads, parts, [=](int a, int b) {
        c->pool.touch(c->pool.size / parts * a, c->pool.size / parts * b);
    });
    c->team.start();
    return 1;
}

uint32_t zl_launch(zl_context* c, int slot) { return c->team.launch(slot); }

int zl_wait(zl_context* c, uint32_t seq) {
    c->team.wait(seq);
    return c->status[seq % 8];
}

void zl_close(zl_context* c) { delete c; }

namespace {

// Calls f(page, token on it, index into [n, kv_heads, head_dim], dimension, padded dimension).
template <class T, class F>
int each_element(zl_context* c, int layer, int row, int start, int count, F&& f) {
    const zl::Sizes& n = c->n;
    if (layer < 0 || layer >= n.layers || row < 0 || row >= n.rows || start < 0 || start + count > n.model_len) return 0;
    c->team.settle(c->team.launched());
    for (int i = 0; i < count; i++) {
        const int pos = start + i, id = c->table(row)[pos / zl::kPage];
        if (id < 0 || id >= n.pages) return 0;
        for (int h = 0; h < n.kv_heads; h++)
            for (int d = 0; d < n.head_dim; d++)
                f(c->page<T>(layer, id, h), pos % zl::kPage, ((size_t)i * n.kv_heads + h) * n.head_dim + d, d,
                  d < n.half ? d : n.half_pad + d - n.half);
    }
    return 1;
}

inline float widen(float x) { return x; }
inline float widen(zl::bf16 x) { return zl::bf_to_float(x); }
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, zl::bf16* to) { *to = zl::float_to_bf(x); }

template <class T>
int read_kv(zl_context* c, int layer, int row, int start, int count, float* k, float* v) {
    const int hp = c->n.head_pad;
    return each_element<T>(c, layer, row, start, count, [=](T* page, int token, size_t at, int, int d) {
        k[at] = widen(page[zl::k_at<T>(hp, d, token)]);
        v[at] = widen(page[(size_t)zl::kPage * hp + zl::v_at<T>(d, token)]);
    });
}

template <class T>
int write_kv(zl_context* c, int layer, int row, int start, int count, const float* k, const float* v) {
    const int hp = c->n.head_pad;
    return each_element<T>(c, layer, row, start, count, [=](T* page, int token, size_t at, int dim, int d) {
        if (token == 0 && dim == 0) memset(page, 0, (size_t)2 * zl::kPage * hp * sizeof(T));
        narrow(k[at], page + zl::k_at<T>(hp, d, token));
        narrow(v[at], page + (size_t)zl::kPage * hp + zl::v_at<T>(d, token));
    });
}

int read_kv8(zl_context* c, int layer, int row, int start, int count, float* k, float* v) {
    const int hp = c->n.head_pad;
    return each_element<zl::bf16>(c, layer, row, start, count, [=](zl::bf16* page, int token, size_t at, int, int d) {
        int8_t* in = (int8_t*)page;
        k[at] = zl::bf_to_float(zl::key_scales(in)[token]) * in[zl::k8_at(hp, d, token)];
        v[at] = zl::bf_to_float(zl::value_scales(in)[token]) * in[zl::v8_at(hp, d, token)];
    });
}

int write_kv8(zl_context* c, int layer, int row, int start, int count, const float* k, const float* v) {
    const zl::Sizes& n = c->n;
    return each_element<zl::bf16>(c, layer, row, start, count, [&](zl::bf16* page, int token, size_t at, int dim, int) {
        if (dim) return;  // a token's dimensions have one scale: all of them at the first
        zl::bf16 key[128] = {}, value[128] = {};
        for (int i = 0; i < n.head_dim; i++) {
            const int d = i < n.half ? i : n.half_pad + i - n.half;
            narrow(k[at + i], key + d);
            narrow(v[at + i], value + d);
        }
        zl::insert8((int8_t*)page, n.head_pad, token, 1, key, value, 0);
    });
}

}  // namespace

int zl_read_kv(zl_context* c, int layer, int row, int start, int n, float* k, float* v) {
    if (c->n.kv8) return read_kv8(c, layer, row, start, n, k, v);
    return c->config.is_bf16 ? read_kv<zl::bf16>(c, layer, row, start, n, k, v)
                             : read_kv<float>(c, layer, row, start, n, k, v);
}

int zl_write_kv(zl_context* c, int layer, int row, int start, int n, const float* k, const float* v) {
    if (c->n.kv8) return write_kv8(c, layer, row, start, n, k, v);
    return c->config.is_bf16 ? write_kv<zl::bf16>(c, layer, row, start, n, k, v)
                             : write_kv<float>(c, layer, row, start, n, k, v);
}

int zl_logits(zl_context* c, int max_n, int32_t* seg, float* out) {
    c->team.settle(c->team.launched());
    const int count = (int)c->sampled.size() < max_n ? (int)c->sampled.size() : max_n;
    for (int i = 0; i < count; i++) {
        seg[i] = c->sampled[i];
        memcpy(out + (size_t)i * c->n.vocab, c->logits + (size_t)i * c->n.logit_stride, (size_t)c->n.vocab * 4);
    }
    return count;
}

const double* zl_times(zl_context* c) {
    c->team.settle(c->team.launched());
    return c->times;
}

int zl_batches(zl_context* c, int32_t* rows, int32_t* shared) {
    c->team.settle(c->team.launched());
    for (const zl::Together& b : c->at.batches) *rows++ = b.count, *shared++ = b.shared;
    return (int)c->at.batches.size();
}

void zl_state(zl_context* c, int32_t** last_token, uint8_t** done, uint32_t** seen, int32_t** prompt_ids) {
    *last_token = c->last_token;
    *done = c->done;
    *seen = c->seen;
    *prompt_ids = c->prompt_ids;
}
