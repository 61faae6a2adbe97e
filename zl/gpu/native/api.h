// The C interface of the native step: plain structs of sizes and column addresses, filled by step.py.
// Every array belongs to the caller and outlives the context; nothing is copied but the rope tables and the weights.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

struct zl_config {
    int32_t n_layers, hidden, n_heads, n_kv_heads, head_dim, ffn, vocab;
    int32_t max_rows, max_model_len, pages_per_row, n_pages, max_step_tokens;
    int32_t n_threads, is_bf16, kv8, n_eos;  // kv8: keys and values in eight bits, of a bf16 step
    int32_t bloom;                           // the penalty's filter: 0 exact, 1 a Bloom filter (filter.cpp)
    float rms_eps;
    const int32_t* eos;
    // What each packed matrix has beside its plain form: [n_layers][qkv, out, gate and up, down], then the head; 0
    // nothing, 1 four-bit blocks (Q4_0, Q4_1), 2 eight-bit blocks (Q8_0). All 0 in float32.
    const uint8_t* kinds;
};

// RowColumns: [max_rows, ...], constant during a row's life. How a prompt lies in pieces is said there.
struct zl_columns {
    const int32_t* own_ids;  // [max_rows, max_model_len]
    const int32_t* n_pieces;
    const int32_t* piece_at;      // [max_rows, max_pieces]
    const int64_t* piece_source;  // [max_rows, max_pieces]
    const uint8_t* arena;         // [arena_bytes]
    int64_t max_pieces, arena_bytes;
    const int32_t* prompt_len;
    const int32_t* max_new;
    const int32_t* page_table;  // [max_rows, pages_per_row]
    const float* temperature;
    const float* top_p;
    const float* penalty;
    const uint64_t* seed;
    const uint8_t* row_flags;
};

// StepSlot: inputs read at the step's start, outputs valid once zl_wait returned.
struct zl_slot {
    const int32_t* n_segs;
    const int32_t* seg_row;
    const int32_t* seg_start;
    const int32_t* seg_len;
    const uint8_t* seg_flags;
    int32_t* out_token;
    float* out_logprob;
    uint8_t* out_flags;
};

enum zl_weight_name {
    ZL_EMBED, ZL_NORM, ZL_HEAD,
    ZL_ATTN_NORM, ZL_WQ, ZL_WK, ZL_WV, ZL_WO, ZL_MLP_NORM, ZL_GATE, ZL_UP, ZL_DOWN,
    ZL_BQ, ZL_BK, ZL_BV, ZL_BO, ZL_BGATE, ZL_BUP, ZL_BDOWN,
};

enum zl_segment_flag { ZL_SAMPLE = 1, ZL_FIRST = 2 };
enum zl_row_flag { ZL_IGNORE_EOS = 1, ZL_LOGPROBS = 2 };
enum zl_out_flag { ZL_EOS = 1, ZL_LENGTH = 2, ZL_NUMERIC = 4, ZL_SKIPPED = 8 };
// Status of a step: 0, or which rule of the slot was broken.
enum zl_status { ZL_OK = 0, ZL_TOO_MANY_TOKENS = 1, ZL_BAD_SEGMENT = 2, ZL_BAD_PAGE = 3, ZL_BAD_PROMPT = 4 };

struct zl_context;

// Opens a context with weights, pool and scratch allocated and no thread running; null when memory is refused.
zl_context* zl_open(const zl_config*, const zl_columns*, const zl_slot* slots /*[2]*/);
// Counts the bytes that zl_open would map: weights, pool, scratch. Returns 0 where it would refuse the config.
int zl_count(const zl_config*, size_t* out /*[3]*/);
// Packs one tensor. Matrices: [rows, cols] row-major in the context's dtype; norms and biases: float32 [1, cols].
// Returns 0 when name, layer or size do not fit the config.
int zl_weight(zl_context*, int name, int layer, const void* data, int64_t rows, int64_t cols, int is_matrix);
// Adds the file's blocks, uint8 [rows, row_bytes], of one matrix whose kind is not 0. type: GGML's number of the format.
// Returns 0 as zl_weight does, and for values that the packed form cannot hold.
int zl_blocks(zl_context*, int name, int layer, int type, const uint8_t* data, int64_t rows, int64_t row_bytes);
// cos, sin: float32 [n_pos, head_dim / 2].
int zl_rope(zl_context*, const float* cos, const float* sin, int64_t n_pos);
// The packed weights and rope tables as a file, instead of zl_weight and zl_rope: bytes of it, written at the file's
// position, read from byte `begin` into a context of the same config (pages, rows and threads may differ). 0 on failure.
int64_t zl_packed_bytes(zl_context*);
int zl_export(zl_context*, int fd);
int zl_import(zl_context*, int fd, int64_t begin);
// Touches the pool and starts the workers.
int zl_start(zl_context*);
uint32_t zl_launch(zl_context*, int slot);
// Blocks until step `seq` has ended; returns its zl_status.
int zl_wait(zl_context*, uint32_t seq);
void zl_close(zl_context*);

// Debugging and the fallback; only while no step is in flight. k, v: float32 [n, n_kv_heads, head_dim].
int zl_read_kv(zl_context*, int layer, int row, int start, int n, float* k, float* v);
int zl_write_kv(zl_context*, int layer, int row, int start, int n, const float* k, const float* v);
// Logits of the last step's samples: returns the count, fills seg[i] and out[i * vocab ...] up to max_n rows.
int zl_logits(zl_context*, int max_n, int32_t* seg, float* out);
// Times of the last step in microseconds, by stage, once no worker looks at it any more; each step writes the same place.
const double* zl_times(zl_context*);
// Batches of the last step's decoding rows (plan.cpp): fills each one's rows and shared pages, at most max_rows; the count.
int zl_batches(zl_context*, int32_t* rows, int32_t* shared);
// Device state: last_token i32[max_rows], done u8[max_rows], seen u32[max_rows, words of a filter], prompt_ids
// i32[max_rows, max_model_len], gathered in a row's first step.
void zl_state(zl_context*, int32_t** last_token, uint8_t** done, uint32_t** seen, int32_t** prompt_ids);

// Heartbeat and fallback (inspect.cpp).
// The packed weights, rope tables included: address and bytes, a multiple of 64.
void* zl_packed(zl_context*, size_t* bytes);
// Clears them, so that zl_rope and zl_weight pack all of it a second time.
void zl_unload(zl_context*);
// Blocks until no worker looks at any launched step.
void zl_settle(zl_context*);
// The KV pool, T [n_layers][n_pages][n_kv_heads][2 * 32 * head_pad]; in eight bits int8, the last axis as
// kv8.hpp says. k_at, v_at: int32[32 * head_dim], filled with the place of
// (token, dimension) within the last axis.
void* zl_pool(zl_context*, int32_t* k_at, int32_t* v_at);
// The inverse of zl_weight (pack.cpp), for plain matrices, norms and biases; 0 also where the model has no such bias.
int zl_unpack(zl_context*, int name, int layer, void* out, int64_t rows, int64_t cols, int is_matrix);
}
