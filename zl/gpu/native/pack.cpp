// Puts a model's tensors into the layouts of context.hpp. Padding stays zero: the arena comes zeroed from the kernel.
#include "attention.hpp"
#include "context.hpp"
#include "micro.hpp"

namespace zl {

struct Column {
    int block, tile, lane;
};

// Where a tensor goes: its packed matrix, and how its rows and columns lie there.
struct Place {
    Packed* to = nullptr;
    int kt = 0, rows = 0, cols = 0;
    int first_head = -1;  // of rows that are heads, padded by halves; else -1
    int tile = -1;        // of rows that share blocks with another tensor's; else -1
    bool heads_in_k = false;
    int head_dim, half, half_pad;

    Place(zl_context& c, int name, int layer) : head_dim(c.n.head_dim), half(c.n.half), half_pad(c.n.half_pad) {
        const Sizes& n = c.n;
        Layer* l = name > ZL_HEAD ? &c.layers[layer] : nullptr;
        kt = n.kt_hidden, cols = n.hidden;
        switch (name) {
            case ZL_HEAD: to = &c.head, rows = n.vocab; break;
            case ZL_WQ: to = &l->wqkv, rows = n.heads * head_dim, first_head = 0; break;
            case ZL_WK: to = &l->wqkv, rows = n.kv_heads * head_dim, first_head = n.heads; break;
            case ZL_WV: to = &l->wqkv, rows = n.kv_heads * head_dim, first_head = n.heads + n.kv_heads; break;
            case ZL_WO:
                to = &l->wo, kt = n.kt_attn, rows = n.hidden, cols = n.heads * head_dim, heads_in_k = half != half_pad;
                break;
            case ZL_GATE: to = &l->wgu, rows = n.ffn, tile = 0; break;
            case ZL_UP: to = &l->wgu, rows = n.ffn, tile = 1; break;
            case ZL_DOWN: to = &l->wdown, kt = n.kt_ffn, rows = n.hidden, cols = n.ffn; break;
            default: break;
        }
    }
    bool fits(int64_t n_rows, int64_t n_cols) const { return to && n_rows == rows && n_cols == cols; }
    Column column(int r) const {
        if (tile >= 0) return {r / 16, tile, r % 16};
        if (first_head < 0) return {r / 32, r % 32 / 16, r % 16};
        const int head = r / head_dim + first_head, d = r % head_dim, i = d < half ? d : d - half;
        return {head * (2 * half_pad / 32) + i / 16, d >= half, i % 16};
    }
    int k(int k) const {
        if (!heads_in_k) return k;
        const int head = k / head_dim, d = k % head_dim;
        return head * 2 * half_pad + (d < half ? d : half_pad + d - half);
    }
    // Calls f(row) for all rows on several threads; rows that share a tile stay on one of them.
    template <class F>
    void each_row(int n_threads, F&& f) const {
        const int unit = first_head >= 0 ? head_dim : 32, units = (rows + unit - 1) / unit;
        scatter((int64_t)rows * cols > 1 << 20 ? n_threads : 1, units, [&](int a, int b) {
            for (int r = a * unit; r < b * unit && r < rows; r++) f(r);
        });
    }
};

template <class T>
static bool pack_matrix(zl_context& c, int name, int layer, const T* src, int64_t rows, int64_t cols) {
    if (name == ZL_EMBED) {
        if (rows != c.n.vocab || cols != c.n.hidden) return false;
        for (int64_t r = 0; r < rows; r++)
            memcpy((T*)c.embed + r * c.n.hidden_pad, src + r * cols, (size_t)cols * sizeof(T));
        return true;
    }
    const Place p(c, name, layer);
    if (!p.fits(rows, cols)) return false;
    p.each_row(c.config.n_threads, [&](int r) {
        const Column at = p.column(r);
        T* base = (T*)p.to->plain.data + (size_t)at.block * p.kt * 2 * kTile + (size_t)at.tile * kTile;
        const T* s = src + (size_t)r * p.cols;
        for (int j = 0; j < p.cols; j++) {
            const int k = p.k(j);
            base[(size_t)(k >> 5) * 2 * kTile + in_tile<T>(k & 31, at.lane)] = s[j];
        }
    });
    return true;
}

// GGML's numbers of the block formats; all hold 32 values.
enum Format { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8 };

// One block of 32 k of one column, into a record of kind kQ4. Q4_0 is Q4_1 with m = -8 d.
static bool put_q4(char* record, int tile, int lane, const uint8_t* block, bool has_m) {
    uint16_t scale[2];
    memcpy(scale, block, has_m ? 4 : 2);
    if (!has_m) {
        const float m = -8 * _cvtsh_ss(scale[0]);
        scale[1] = (uint16_t)_cvtss_sh(m, 0);
        if (_cvtsh_ss(scale[1]) != m) return false;
    }
    memcpy(record + 512 + tile * 64 + lane * 2, &scale[0], 2);
    memcpy(record + 512 + tile * 64 + 32 + lane * 2, &scale[1], 2);
    const uint8_t* q = block + (has_m ? 4 : 2);
    for (int k = 0; k < 32; k++) {
        const int value = k < 16 ? q[k] & 15 : q[k - 16] >> 4;
        record[q4_at(tile, k, lane)] |= (char)(value << q4_shift(k, lane));
    }
    return true;
}

static bool put_q8(char* record, int tile, int lane, const uint8_t* block) {
    memcpy(record + 1024 + tile * 32 + lane * 2, block, 2);
    for (int k = 0; k < 32; k++) record[q8_at(tile, k, lane)] = (char)block[2 + k];
    return true;
}

static bool pack_blocks(zl_context& c, int name, int layer, int type, const uint8_t* src, int64_t rows, int64_t row_bytes) {
    const int kind = type == kQ8_0 ? kQ8 : kQ4, size = type == kQ8_0 ? 34 : type == kQ4_1 ? 20 : 18;
    if ((type != kQ8_0 && type != kQ4_1 && type != kQ4_0) || row_bytes % size) return false;
    const Place p(c, name, layer);
    if (!p.fits(rows, row_bytes / size * 32) || p.heads_in_k || p.to->blocks.kind != kind) return false;
    const size_t record = record_bytes(kind, 2);
    std::atomic<bool> held{true};
    p.each_row(c.config.n_threads, [&](int r) {
        const Column at = p.column(r);
        char* to = p.to->blocks.data + (size_t)at.block * p.kt * record;
        const uint8_t* s = src + r * row_bytes;
        for (int b = 0; b < p.cols / 32; b++, to += record, s += size)
            if (!(kind == kQ8 ? put_q8(to, at.tile, at.lane, s) : put_q4(to, at.tile, at.lane, s, type == kQ4_1)))
                held = false;
    });
    return held;
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

template <class T>
static bool unpack_matrix(zl_context& c, int name, int layer, T* out, int64_t rows, int64_t cols) {
    if (name == ZL_EMBED) {
        if (rows != c.n.vocab || cols != c.n.hidden) return false;
        for (int64_t r = 0; r < rows; r++)
            memcpy(out + r * cols, (const T*)c.embed + r * c.n.hidden_pad, (size_t)cols * sizeof(T));
        return true;
    }
    const Place p(c, name, layer);
    if (!p.fits(rows, cols)) return false;
    p.each_row(c.config.n_threads, [&](int r) {
        const Column at = p.column(r);
        const T* base = (const T*)p.to->plain.data + (size_t)at.block * p.kt * 2 * kTile + (size_t)at.tile * kTile;
        T* to = out + (size_t)r * p.cols;
        for (int j = 0; j < p.cols; j++) {
            const int k = p.k(j);
            to[j] = base[(size_t)(k >> 5) * 2 * kTile + in_tile<T>(k & 31, at.lane)];
        }
    });
    return true;
}

static bool unpack_vector(zl_context& c, int name, int layer, float* out, int count) {
    const Sizes& n = c.n;
    Layer* l = name > ZL_HEAD ? &c.layers[layer] : nullptr;
    auto copy = [&](const float* from, int want) {
        if (from && count == want) memcpy(out, from, (size_t)count * 4);
        return from && count == want;
    };
    auto heads = [&](int first, int n_heads) {
        if (!l->bqkv || count != n_heads * n.head_dim) return false;
        for (int r = 0; r < count; r++) {
            const int head = r / n.head_dim + first, d = r % n.head_dim, i = d < n.half ? d : d - n.half;
            out[r] = l->bqkv[(size_t)(head * (n.head_pad / 32) + i / 16) * 32 + (d >= n.half) * 16 + i % 16];
        }
        return true;
    };
    switch (name) {
        case ZL_NORM: return copy(c.norm, n.hidden);
        case ZL_ATTN_NORM: return copy(l->attn_norm, n.hidden);
        case ZL_MLP_NORM: return copy(l->mlp_norm, n.hidden);
        case ZL_BQ: return heads(0, n.heads);
        case ZL_BK: return heads(n.heads, n.kv_heads);
        case ZL_BV: return heads(n.heads + n.kv_heads, n.kv_heads);
        case ZL_BO: return copy(l->bo, n.hidden);
        case ZL_BDOWN: return copy(l->bdown, n.hidden);
        case ZL_BGATE:
        case ZL_BUP: {
            if (!l->bgu || count != n.ffn) return false;
            for (int r = 0; r < count; r++) out[r] = l->bgu[(size_t)(r / 16) * 32 + (name == ZL_BUP) * 16 + r % 16];
            return true;
        }
        default: return false;
    }
}

}  // namespace zl

int zl_unpack(zl_context* c, int name, int layer, void* out, int64_t rows, int64_t cols, int is_matrix) {
    if (name > ZL_HEAD && (layer < 0 || layer >= c->n.layers)) return 0;
    if (!is_matrix) return zl::unpack_vector(*c, name, layer, (float*)out, (int)cols);
    if (c->config.is_bf16) return zl::unpack_matrix(*c, name, layer, (zl::bf16*)out, rows, cols);
    return zl::unpack_matrix(*c, name, layer, (float*)out, rows, cols);
}

int zl_weight(zl_context* c, int name, int layer, const void* data, int64_t rows, int64_t cols, int is_matrix) {
    if (name > ZL_HEAD && (layer < 0 || layer >= c->n.layers)) return 0;
    if (!is_matrix) return zl::pack_vector(*c, name, layer, (const float*)data, (int)cols);
    if (c->config.is_bf16) return zl::pack_matrix(*c, name, layer, (const zl::bf16*)data, rows, cols);
    return zl::pack_matrix(*c, name, layer, (const float*)data, rows, cols);
}

int zl_blocks(zl_context* c, int name, int layer, int type, const uint8_t* data, int64_t rows, int64_t row_bytes) {
    if (name > ZL_HEAD && (layer < 0 || layer >= c->n.layers)) return 0;
    return zl::pack_blocks(*c, name, layer, type, data, rows, row_bytes);
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
