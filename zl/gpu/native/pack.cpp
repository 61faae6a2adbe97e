// Puts a model's tensors into the layouts of context.hpp. Padding stays zero: the arena comes zeroed from the kernel.
#include "attention.hpp"
#include "context.hpp"
#include "micro.hpp"

namespace zl {

struct Column {
    int block, tile, lane;
};

// dst: packed matrix of kt k tiles. to_column maps a source row, to_k a source column.
template <class T, class N, class K>
static void pack(T* dst, int kt, const T* src, int rows, int cols, int n_threads, N&& to_column, K&& to_k) {
    scatter((int64_t)rows * cols > 1 << 20 ? n_threads : 1, rows, [=](int a, int b) {
        for (int r = a; r < b; r++) {
            const Column c = to_column(r);
            T* base = dst + (size_t)c.block * kt * 2 * kTile + (size_t)c.tile * kTile;
            const T* s = src + (size_t)r * cols;
            for (int k = 0; k < cols; k++) {
                const int at = to_k(k);
                base[(size_t)(at >> 5) * 2 * kTile + in_tile<T>(at & 31, c.lane)] = s[k];
            }
        }
    });
}

template <class T>
static bool pack_matrix(zl_context& c, int name, int layer, const T* src, int rows, int cols) {
    const Sizes& n = c.n;
    const int threads = c.config.n_threads;
    auto same = [](int k) { return k; };
    auto plain = [](int r) { return Column{r / 32, r % 32 / 16, r % 16}; };
    const int half = n.half, half_pad = n.half_pad, head_dim = n.head_dim, per_head = n.head_pad / 32;
    auto into_heads = [=](int first) {
        return [=](int r) {
            const int head = r / head_dim + first, d = r % head_dim, i = d < half ? d : d - half;
            return Column{head * per_head + i / 16, d >= half, i % 16};
        };
    };
    auto from_heads = [=](int k) {
        const int head = k / head_dim, d = k % head_dim;
        return head * 2 * half_pad + (d < half ? d : half_pad + d - half);
    };
    const int q_rows = n.heads * head_dim, kv_rows = n.kv_heads * head_dim;
    auto is = [&](int want_rows, int want_cols) { return rows == want_rows && cols == want_cols; };
    Layer* l = name > ZL_HEAD ? &c.layers[layer] : nullptr;
    switch (name) {
        case ZL_EMBED:
            if (!is(n.vocab, n.hidden)) return false;
            for (int r = 0; r < rows; r++)
                memcpy((T*)c.embed + (size_t)r * n.hidden_pad, src + (size_t)r * cols, (size_t)cols * sizeof(T));
            return true;
        case ZL_HEAD:
            if (!is(n.vocab, n.hidden)) return false;
            pack((T*)c.head, n.kt_hidden, src, rows, cols, threads, plain, same);
            return true;
        case ZL_WQ:
            if (!is(q_rows, n.hidden)) return false;
            pack((T*)l->wqkv, n.kt_hidden, src, rows, cols, threads, into_heads(0), same);
            return true;
        case ZL_WK:
            if (!is(kv_rows, n.hidden)) return false;
            pack((T*)l->wqkv, n.kt_hidden, src, rows, cols, threads, into_heads(n.heads), same);
            return true;
        case ZL_WV:
            if (!is(kv_rows, n.hidden)) return false;
            pack((T*)l->wqkv, n.kt_hidden, src, rows, cols, threads, into_heads(n.heads + n.kv_heads), same);
            return true;
        case ZL_WO:
            if (!is(n.hidden, q_rows)) return false;
            pack((T*)l->wo, n.kt_attn, src, rows, cols, threads, plain, from_heads);
            return true;
        case ZL_GATE:
        case ZL_UP: {
            if (!is(n.ffn, n.hidden)) return false;
            const int tile = name == ZL_UP;
            pack((T*)l->wgu, n.kt_hidden, src, rows, cols, threads,
                 [=](int r) { return Column{r / 16, tile, r % 16}; }, same);
            return true;
        }
        case ZL_DOWN:
            if (!is(n.hidden, n.ffn)) return false;
            pack((T*)l->wdown, n.kt_ffn, src, rows, cols, threads, plain, same);
            return true;
        default: return false;
    }
}

static float* bias_of(zl_context& c, float*& bias, int blocks) {
    if (!bias) bias = c.weights.take<float>((size_t)blocks * 128);
    return bias;
}

// Norms and biases; a bias follows its matrix's columns.
static bool pack_vector(zl_context& c, int name, int layer, const float* src, int count) {
    const Sizes& n = c.n;
    Layer* l = name > ZL_HEAD ? &c.layers[layer] : nullptr;
    auto heads = [&](int first, int n_heads) {
        if (count != n_heads * n.head_dim) return false;
        float* b = bias_of(c, l->bqkv, n.nb_qkv);
        for (int r = 0; r < count; r++) {
            const int head = r / n.head_dim + first, d = r % n.head_dim, i = d < n.half ? d : d - n.half;
            b[(size_t)(head * (n.head_pad / 32) + i / 16) * 32 + (d >= n.half) * 16 + i % 16] = src[r];
        }
        return true;
    };
    auto copy = [&](float* to, int want) {
        if (count == want) memcpy(to, src, (size_t)count * 4);
        return count == want;
    };
    switch (name) {
        case ZL_NORM: return copy(c.norm, n.hidden);
        case ZL_ATTN_NORM: return copy(l->attn_norm, n.hidden);
        case ZL_MLP_NORM: return copy(l->mlp_norm, n.hidden);
        case ZL_BQ: return heads(0, n.heads);
        case ZL_BK: return heads(n.heads, n.kv_heads);
        case ZL_BV: return heads(n.heads + n.kv_heads, n.kv_heads);
        case ZL_BO: return copy(bias_of(c, l->bo, n.nb_hidden), n.hidden);
        case ZL_BDOWN: return copy(bias_of(c, l->bdown, n.nb_hidden), n.hidden);
        case ZL_BGATE:
        case ZL_BUP: {
            if (count != n.ffn) return false;
            float* b = bias_of(c, l->bgu, n.nb_gate_up);
            for (int r = 0; r < count; r++) b[(size_t)(r / 16) * 32 + (name == ZL_BUP) * 16 + r % 16] = src[r];
            return true;
        }
        default: return false;
    }
}

}  // namespace zl

int zl_weight(zl_context* c, int name, int layer, const void* data, int64_t rows, int64_t cols, int is_matrix) {
    if (name > ZL_HEAD && (layer < 0 || layer >= c->n.layers)) return 0;
    if (!is_matrix) return zl::pack_vector(*c, name, layer, (const float*)data, (int)cols);
    if (c->config.is_bf16) return zl::pack_matrix(*c, name, layer, (const zl::bf16*)data, (int)rows, (int)cols);
    return zl::pack_matrix(*c, name, layer, (const float*)data, (int)rows, (int)cols);
}

int zl_rope(zl_context* c, const float* cos, const float* sin, int64_t n_pos) {
    const zl::Sizes& n = c->n;
    if (n_pos < n.model_len) return 0;
    for (int i = 0; i < n.model_len; i++) {
        memcpy(c->cos + (size_t)i * n.half_pad, cos + (size_t)i * n.half, (size_t)n.half * 4);
        memcpy(c->sin + (size_t)i * n.half_pad, sin + (size_t)i * n.half, (size_t)n.half * 4);
    }
    return 1;
}
