// Everything a step reads and writes: sizes, packed weights, the KV pool, scratch, and the plan of the running step.
// State: zl_context owns all memory; it is allocated in zl_open and not resized afterwards.
//
// Layouts (elements of T: float or bf16; a tile is 512 elements)
//   activation  [m / 16][k / 32][16][32]                      rows beyond the last one hold stale values
//   matrix      [n / 32][k / 32] records of 2 column tiles    tile as in micro.hpp, record as in blocks.hpp
//   pool        [layer][page][kv head][K block, V block]
//   K block     [2 groups of 16 tokens][head_pad / 32][tile]  k = dimension, n = token
//   V block     [head_pad / 16][tile]                         k = token, n = dimension
//               in eight bits: see kv8.hpp
// A head's dimensions are padded by halves to head_pad = 2 * round_up(head_dim / 2, 16): the rotation then meets both
// of its operands in the two column tiles of one block, and the padding is zero everywhere.
#pragma once
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "api.h"
#include "blocks.hpp"
#include "draw.hpp"
#include "memory.hpp"
#include "simd.hpp"
#include "threads.hpp"

namespace zl {

constexpr int kPage = 32;
constexpr int kOwnRows = 4;  // steps up to here are normed by every thread for itself; at most 16

enum TimeOf {
    kPlan, kEmbed, kNorm, kQkv, kInsert, kAttention, kOut, kMlpNorm, kGateUp, kDown, kFinalNorm, kHead, kSample,
    kTotal, kTimes
};

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

struct Sizes {
    int layers, hidden, hidden_pad, heads, kv_heads, group, head_dim, half, half_pad, head_pad, ffn, ffn_pad, vocab;
    int kt_hidden, kt_attn, kt_ffn;                      // k tiles
    int nb_qkv, nb_hidden, nb_gate_up, nb_vocab;         // blocks of 32 columns
    zl_filter filter;                                    // of the tokens seen
    int seen_words, logit_stride, stat_room, rows, model_len, table_width, pages, tokens, tokens_pad;
    size_t elem;                                         // bytes of T
    bool kv8;                                            // keys and values in eight bits; T is bf16
    size_t page_elems;                                   // of one page and kv head: K and V
    size_t layer_elems;                                  // of one layer's pool
    explicit Sizes(const zl_config& c);
};

struct Layer {
    Packed wqkv, wo, wgu, wdown;
    float *attn_norm, *mlp_norm;
    float *bqkv, *bo, *bgu, *bdown;  // null where the model has none
};

struct Segment {
    int slot_index, row, start, len, token0;
    bool sample, first;
};

// Decoding rows whose first `shared` pages are the same: decodes [first, first + count) of the plan. A row alone shares none.
struct Together {
    int first, count, shared;
};

// The running step, written by `plan` and read by all workers.
struct Plan {
    const zl_slot* slot = nullptr;
    int status = 0;
    std::vector<Segment> segs;
    std::vector<int> pos, seg_of;        // by token of the step
    std::vector<int> decodes;            // segments of one token, attended with their insertion, batch by batch
    std::vector<Together> batches;       // of them
    std::vector<std::pair<int, int>> fills;  // (segment, page of the row) of longer segments
    std::vector<std::pair<int, int>> tiles;  // (segment, first 16-row query tile) of longer segments
    std::vector<int> samples;            // segments that draw
    std::vector<zl_sample_stats> measures;  // of their logits
};

}  // namespace zl

struct zl_context : zl::Job {
    zl::Sizes n;
    zl_config config;
    zl_columns columns;
    zl_slot slots[2];
    std::vector<int32_t> eos;

    zl::Arena weights, pool, scratch;
    void* embed;  // T [vocab][hidden_pad]
    zl::Packed head;
    float *norm, *cos, *sin;  // cos, sin: [model_len][half_pad]
    std::vector<zl::Layer> layers;

    // Scratch by token of the step.
    float* x;                            // residual [tokens_pad][hidden_pad]
    void *act_hidden, *act_attn, *act_ffn;  // activations
    void *q, *k, *v;                     // [tokens_pad][heads][head_pad]
    float* logits;                       // [rows][logit_stride]
    float* stats;                        // [rows][3][stat_room], of the logits' blocks
    // By thread.
    std::vector<void*> attn_scratch;
    std::vector<void*> unpacked;         // one block of 32 columns; a turned activation and unpacked records; or a panel's sums
    std::vector<void*> own_act;          // [kOwnRows] normed rows as an activation
    std::vector<std::unique_ptr<zl::Drawer>> drawers;
    // Device state by row.
    int32_t* last_token;
    uint8_t* done;
    uint32_t* seen;
    int32_t* prompt_ids;                 // [rows][model_len]

    zl::Plan at;
    int status[8] = {};                  // of the last steps, by sequence number
    uint32_t planned = 0;                // steps planned so far
    double times[zl::kTimes] = {};
    std::vector<int> sampled;            // slot indices of the last step's samples
    zl::Team team;

    zl_context(const zl_config& c, const zl_columns& columns, const zl_slot* slots);
    ~zl_context() override;
    void plan(int slot) override;
    void work(zl::Worker& w) override;
    bool allocate();

    template <class T>
    T* page(int layer, int page_id, int kv_head) const {
        return (T*)pool.base + (size_t)layer * n.layer_elems + ((size_t)page_id * n.kv_heads + kv_head) * n.page_elems;
    }
    int32_t* prompt(int row) const { return prompt_ids + (size_t)row * n.model_len; }
    const int32_t* table(int row) const { return columns.page_table + (size_t)row * n.table_width; }
    size_t room8_at() const;  // where a thread's room for eight-bit pages begins in its attention scratch
    size_t attn_scratch_bytes() const;
    int stage_count() const { return n.layers * 9 + 8; }
};

namespace zl {

inline double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Adds the time since the last mark to a stage; only the first worker keeps times.
struct Clock {
    double* times;
    double last;
    Clock(zl_context& c, const Worker& w) : times(w.index == 0 ? c.times : nullptr), last(times ? now_us() : 0) {}
    void mark(TimeOf stage) {
        if (!times) return;
        double now = now_us();
        times[stage] += now - last;
        last = now;
    }
};

// Implemented in forward.hpp, one translation unit a dtype.
void forward_f32(zl_context& c, Worker& w);
void forward_bf16(zl_context& c, Worker& w);

}  // namespace zl
