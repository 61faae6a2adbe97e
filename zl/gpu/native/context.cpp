// Sizes, memory and life of a context.
#include "context.hpp"

#include <algorithm>
#include <new>

#include "kv8.hpp"

namespace zl {

Sizes::Sizes(const zl_config& c) {
    layers = c.n_layers, hidden = c.hidden, heads = c.n_heads, kv_heads = c.n_kv_heads, head_dim = c.head_dim;
    ffn = c.ffn, vocab = c.vocab;
    hidden_pad = round_up(hidden, 32), ffn_pad = round_up(ffn, 32);
    group = heads / kv_heads;
    half = head_dim / 2, half_pad = round_up(half, 16), head_pad = 2 * half_pad;
    kt_hidden = hidden_pad / 32, kt_attn = heads * head_pad / 32, kt_ffn = ffn_pad / 32;
    nb_qkv = (heads + 2 * kv_heads) * head_pad / 32, nb_hidden = hidden_pad / 32, nb_gate_up = ffn_pad / 16;
    nb_vocab = round_up(vocab, 32) / 32;
    filter = {vocab, c.bloom};
    seen_words = zl_filter_words(filter);
    logit_stride = nb_vocab * 32 + 32;  // rows at multiples of 4 KB would share their cache sets
    stat_room = zl_sample_stat_room(vocab);
    rows = c.max_rows, model_len = c.max_model_len, table_width = c.pages_per_row, pages = c.n_pages;
    tokens = c.max_step_tokens, tokens_pad = round_up(tokens, 32);
    elem = c.is_bf16 ? 2 : 4;
    kv8 = c.is_bf16 && c.kv8;
    page_elems = kv8 ? page8_bytes(head_pad) / 2 : (size_t)2 * kPage * head_pad;
    layer_elems = (size_t)pages * kv_heads * page_elems;
}

}  // namespace zl

using zl::Arena;

zl_context::zl_context(const zl_config& c, const zl_columns& cols, const zl_slot* s)
    : n(c), config(c), columns(cols), slots{s[0], s[1]}, eos(c.eos, c.eos + c.n_eos), layers(c.n_layers),
      team(c.n_threads, stage_count(), this) {
    at.segs.reserve(n.rows);
    at.pos.reserve(n.tokens);
    at.seg_of.reserve(n.tokens);
    at.decodes.reserve(n.rows);
    at.batches.reserve(n.rows);
    at.fills.reserve(n.tokens / zl::kPage + 2 * n.rows);
    at.tiles.reserve((size_t)n.tokens * n.group / 16 + n.rows + 1);
    at.samples.reserve(n.rows);
    at.measures.reserve(n.rows);
    sampled.reserve(n.rows);
}

zl_context::~zl_context() {
    team.stop();
    weights.close();
    pool.close();
    scratch.close();
}

// Scores of 16 queries over a whole row, their exponentials in T, sums and staged queries.
size_t zl_context::room8_at() const {
    size_t span = (size_t)zl::round_up(n.model_len, zl::kPage) * 16;
    return Arena::room(span * 4) + Arena::room(span * n.elem) + Arena::room((size_t)16 * n.head_pad * 4) +
           Arena::room((size_t)16 * n.head_pad * 4);
}

size_t zl_context::attn_scratch_bytes() const {
    return room8_at() + (n.kv8 ? zl::room8_bytes(n.head_pad) : 0);
}

bool zl_context::allocate() {
    const size_t hid = Arena::room((size_t)n.hidden_pad * 4);
    const size_t biases = Arena::room((size_t)n.nb_qkv * 128) + Arena::room((size_t)n.nb_gate_up * 128) + 2 * hid;
    const size_t emb = Arena::room((size_t)n.vocab * n.hidden_pad * n.elem);
    const size_t rope = Arena::room((size_t)n.model_len * n.half_pad * 4);
    struct Item {
        zl::Packed* to;
        int blocks, kt;
    };
    std::vector<Item> items;  // in the order of a step
    for (auto& l : layers)
        items.insert(items.end(), {{&l.wqkv, n.nb_qkv, n.kt_hidden}, {&l.wo, n.nb_hidden, n.kt_attn},
                                   {&l.wgu, n.nb_gate_up, n.kt_hidden}, {&l.wdown, n.nb_hidden, n.kt_ffn}});
    items.push_back({&head, n.nb_vocab, n.kt_hidden});
    auto bytes = [&](const Item& i, int kind) { return (size_t)i.blocks * i.kt * zl::record_bytes(kind, n.elem); };
    size_t matrices = 0;
    for (size_t i = 0; i < items.size(); i++) {
        const int kind = items[i].to->blocks.kind = config.kinds[i];
        matrices += bytes(items[i], zl::kPlain) + (kind ? bytes(items[i], kind) : 0);
    }
    if (!weights.open(matrices + n.layers * (2 * hid + biases) + emb + hid + 2 * rope)) return false;
    for (auto& i : items) i.to->plain.data = weights.take<char>(bytes(i, zl::kPlain));
    for (auto& i : items)
        if (int kind = i.to->blocks.kind) i.to->blocks.data = weights.take<char>(bytes(i, kind));
    embed = weights.take(emb);
    for (auto& l : layers) {
        l.attn_norm = weights.take<float>(hid);
        l.mlp_norm = weights.take<float>(hid);
        l.bqkv = l.bo = l.bgu = l.bdown = nullptr;  // room is kept; zl_weight takes it
    }
    norm = weights.take<float>(hid);
    cos = weights.take<float>(rope);
    sin = weights.take<float>(rope);

    if (!pool.open(n.layers * n.layer_elems * n.elem)) return false;

    const size_t m = n.tokens_pad, sums = m * n.hidden_pad * 4, acts = m * n.hidden_pad * n.elem;
    const size_t attn = m * n.heads * n.head_pad * n.elem, kvs = m * n.kv_heads * n.head_pad * n.elem;
    const size_t ffns = m * n.ffn_pad * n.elem, lg = (size_t)n.rows * n.logit_stride * 4;
    const size_t stat = (size_t)n.rows * 3 * n.stat_room * 4;
    const size_t state = Arena::room((size_t)n.rows * 4) * 2 + Arena::room((size_t)n.rows * n.seen_words * 4) +
                         Arena::room((size_t)n.rows * n.model_len * 4);
    const size_t final_acts = (size_t)zl::round_up(n.rows, 32) * n.hidden_pad * n.elem;
    const int kt_most = std::max(n.kt_hidden, std::max(n.kt_attn, n.kt_ffn));
    const size_t unpacked_bytes = std::max((size_t)(kt_most + zl::kRing) * zl::kRecordTiles * zl::kTile * n.elem,
                                           (size_t)zl::kPanelRows * 32 * sizeof(float));
    const size_t own_bytes = Arena::room((size_t)16 * n.hidden_pad * n.elem);
    const size_t total = sums + acts + final_acts + 2 * attn + 2 * kvs + ffns + lg + stat + state +
                         (attn_scratch_bytes() + unpacked_bytes + own_bytes) * config.n_threads + 4096;
    if (!scratch.open(total)) return false;
    scratch.touch(0, total);
    x = scratch.take<float>(sums);
    act_hidden = scratch.take(acts > final_acts ? acts : final_acts);
    q = scratch.take(attn);
    act_attn = scratch.take(attn);
    k = scratch.take(kvs);
    v = scratch.take(kvs);
    act_ffn = scratch.take(ffns);
    logits = scratch.take<float>(lg);
    stats = scratch.take<float>(stat);
    last_token = scratch.take<int32_t>((size_t)n.rows * 4);
    done = scratch.take<uint8_t>((size_t)n.rows);
    seen = scratch.take<uint32_t>((size_t)n.rows * n.seen_words * 4);
    prompt_ids = scratch.take<int32_t>((size_t)n.rows * n.model_len * 4);
    for (int t = 0; t < config.n_threads; t++) {
        attn_scratch.push_back(scratch.take(attn_scratch_bytes()));
        unpacked.push_back(scratch.take(unpacked_bytes));
        own_act.push_back(scratch.take(own_bytes));
        drawers.emplace_back(new zl::Drawer(n.filter));
    }
    return true;
}

void zl_context::work(zl::Worker& w) {
    if (config.is_bf16)
        zl::forward_bf16(*this, w);
    else
        zl::forward_f32(*this, w);
}
