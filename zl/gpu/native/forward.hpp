// The stages of a step in order, for one element type. Included by one translation unit a type.
#pragma once
#include "attention_shared.hpp"
#include "context.hpp"
#include "gemm.hpp"
#include "rows.hpp"
#include "sample_blocks.hpp"

namespace zl {

template <class T>
struct Forward {
    zl_context& c;
    Worker& w;
    Clock clock;
    const Sizes& n;
    const Plan& p;
    int m;  // tokens of the step; behind the last attention those that draw

    Forward(zl_context& ctx, Worker& worker)
        : c(ctx), w(worker), clock(ctx, worker), n(ctx.n), p(ctx.at), m((int)ctx.at.pos.size()) {}

    T* kv_row(void* base, int token, int heads, int head) const {
        return (T*)base + ((size_t)token * heads + head) * n.head_pad;
    }

    void embed() {
        w.run(m, 4, [&](int a, int b, int) {
            for (int i = a; i < b; i++) {
                const Segment& s = p.segs[p.seg_of[i]];
                const int pos = p.pos[i];
                const bool in_prompt = pos < c.columns.prompt_len[s.row];
                int id = in_prompt ? c.prompt(s.row)[pos] : c.last_token[s.row];
                if (id < 0 || id >= n.vocab) id = 0;  // an id that slipped through must not read foreign memory
                embed_row((const T*)c.embed, id, n.hidden_pad, c.x + (size_t)i * n.hidden_pad);
            }
        });
        // A row's first step: its filter holds the prompt's tokens.
        w.run((int)p.segs.size(), 1, [&](int a, int b, int) {
            for (int i = a; i < b; i++) {
                const int row = p.segs[i].row;
                if (p.segs[i].first) zl_filter_build(n.filter, seen(row), c.prompt(row), c.columns.prompt_len[row]);
            }
        });
        clock.mark(kEmbed);
    }

    // The normed rows as an activation. Of a few rows each thread makes its own copy, which is cheaper than meeting the
    // others; a thread that was put aside meanwhile may read x while it changes, but then all blocks of the product
    // that follows have been taken and nobody uses its copy.
    const T* norm(const float* weight, TimeOf stage) {
        const bool own = m <= kOwnRows;
        T* to = own ? (T*)c.own_act[w.index] : (T*)c.act_hidden;
        auto rows_of = [&](int a, int b, int) {
            for (int i = a; i < b; i++)
                norm_row(c.x + (size_t)i * n.hidden_pad, weight, n.hidden, n.hidden_pad, c.config.rms_eps, to, i);
        };
        own ? rows_of(0, m, m) : w.run(m, 4, rows_of);
        clock.mark(stage);
        return to;
    }

    // One matrix over all rows; done as in gemm. `then` is the matrix that this thread will read next.
    template <class F>
    void multiply(const void* a, int rows, int kt, const Packed& packed, int blocks, const Packed& then_packed,
                  int then_blocks, int then_kt, TimeOf stage, F&& done) {
        const Matrix &b = packed.pick(rows), &then = then_packed.pick(rows);
        T* room = (T*)c.unpacked[w.index];
        const T* act = ready((const T*)a, rows, kt, b, room);
        const size_t block_bytes = kt * record_bytes(b.kind, n.elem);
        const Split split(rows, blocks, b.kind, w.n_threads);
        const int then_first = split.by_rows ? 0 : w.first(then_blocks);
        const char* next = then.data + (size_t)then_first * then_kt * record_bytes(then.kind, n.elem);
        Later later(done);
        w.run(blocks * split.parts, 1, [&](int item, int, int limit) {
            const Part part = split.at(item);
            const Stream ahead{b.data + (size_t)split.end_block(limit) * block_bytes, next};
            gemm(act, rows, kt, b, part, ahead, room, later);
        }, [&] {
            later.all();
            _mm_sfence();  // `head` stores past the caches
        });
        clock.mark(stage);
    }

    void qkv(const Layer& l, const T* act) {
        const int per = n.head_pad / 32, k0 = n.heads, v0 = n.heads + n.kv_heads;
        multiply(act, m, n.kt_hidden, l.wqkv, n.nb_qkv, l.wo, n.nb_hidden, n.kt_attn, kQkv,
                 [&](int m0, int rows, int nb, const float* out) {
            const int head = nb / per, at = nb % per * 16;
            const float* bias = l.bqkv ? l.bqkv + (size_t)nb * 32 : nullptr;
            for (int i = 0; i < rows; i++) {
                const int token = m0 + i;
                V16 lo = vload(out + i * 32), hi = vload(out + i * 32 + 16);
                if (bias) {
                    lo = vadd(lo, vload(bias));
                    hi = vadd(hi, vload(bias + 16));
                }
                T* to;
                if (head < v0) {
                    const size_t r = (size_t)p.pos[token] * n.half_pad + at;
                    rotate(lo, hi, vload(c.cos + r), vload(c.sin + r));
                    to = head < k0 ? kv_row(c.q, token, n.heads, head) : kv_row(c.k, token, n.kv_heads, head - k0);
                } else {
                    to = kv_row(c.v, token, n.kv_heads, head - v0);
                }
                vstore_from_float(to + at, lo);
                vstore_from_float(to + n.half_pad + at, hi);
            }
        });
    }

    void attend(int layer) {
        if constexpr (sizeof(T) == 2)
            if (n.kv8) return attend_over<true>(layer);
        attend_over<false>(layer);
    }

    template <bool Kv8>
    void attend_over(int layer) {
        Ahead<T, Kv8> ahead{&c};
        Attention<T, Kv8> part(c, layer, c.attn_scratch[w.index], nullptr);
        const int kvh = n.kv_heads;
        w.run((int)p.fills.size() * kvh, 2, [&](int a, int b, int) {
            for (int i = a; i < b; i++) part.fill(p.segs[p.fills[i / kvh].first], p.fills[i / kvh].second, i % kvh);
        });
        clock.mark(kInsert);
        if (!p.tiles.empty()) part.set_tiles();
        w.run((int)p.tiles.size() * kvh, 1, [&](int a, int b, int) {
            for (int i = a; i < b; i++) part.tile(p.segs[p.tiles[i / kvh].first], i % kvh, p.tiles[i / kvh].second);
        });
        SharedAttention<T, Kv8> decoding(c, layer, c.attn_scratch[w.index], &ahead);
        if (!p.decodes.empty()) decoding.set_tiles();
        int expected = -1;
        // Chunks of a row share its page table; few rows are split by heads, so that all threads have some.
        const int items = (int)p.batches.size() * kvh;
        const int chunk = items < 8 * w.n_threads || p.batches.size() < p.decodes.size() ? 1 : kvh;
        w.run(items, chunk, [&](int a, int b, int limit) {
            if (a != expected) ahead.start(layer, a, limit);
            expected = b;
            for (int i = a; i < b; i++) decoding.decode(p.batches[i / kvh], i % kvh);
        });
        clock.mark(kAttention);
    }

    // x += act . matrix (+ bias).
    void add_product(const void* act, int kt, const Packed& matrix, const float* bias, const Packed& then, int then_blocks,
                     TimeOf stage) {
        multiply(act, m, kt, matrix, n.nb_hidden, then, then_blocks, n.kt_hidden, stage, [&](int m0, int rows, int nb, const float* out) {
            for (int i = 0; i < rows; i++) {
                float* x = c.x + (size_t)(m0 + i) * n.hidden_pad + nb * 32;
                V16 lo = vload(out + i * 32), hi = vload(out + i * 32 + 16);
                if (bias) {
                    lo = vadd(lo, vload(bias + nb * 32));
                    hi = vadd(hi, vload(bias + nb * 32 + 16));
                }
                vstore(x, vadd(vload(x), lo));
                vstore(x + 16, vadd(vload(x + 16), hi));
            }
        });
    }

    // Each block holds 16 columns of the gate and the same 16 of up.
    void gate_up(const Layer& l, const T* act) {
        multiply(act, m, n.kt_hidden, l.wgu, n.nb_gate_up, l.wdown, n.nb_hidden, n.kt_ffn, kGateUp,
                 [&](int m0, int rows, int nb, const float* out) {
                     for (int i = 0; i < rows; i++) {
                         V16 g = vload(out + i * 32), u = vload(out + i * 32 + 16);
                         if (l.bgu) {
                             g = vadd(g, vload(l.bgu + nb * 32));
                             u = vadd(u, vload(l.bgu + nb * 32 + 16));
                         }
                         put_half((T*)c.act_ffn, n.kt_ffn, m0 + i, nb, vmul(vsilu(g), u));
                     }
                 });
    }

    // Drops the tokens that draw nothing: behind the last attention nobody asks for them. Rows move forward in place,
    // in order; each thread moves its own columns of all of them.
    void keep_samples() {
        const int count = (int)p.samples.size();
        if (count == m) return;
        auto token = [&](int i) { return p.segs[p.samples[i]].token0 + p.segs[p.samples[i]].len - 1; };
        w.run(n.kt_attn + n.nb_hidden, 4, [&](int a, int b, int) {
            for (int at = a; at < b; at++)
                for (int i = 0; i < count; i++) {
                    const int from = token(i);
                    if (from == i) continue;
                    if (at < n.kt_attn) {
                        T* act = (T*)c.act_attn;
                        memcpy(row_of(act, n.kt_attn, i, at), row_of(act, n.kt_attn, from, at), 32 * sizeof(T));
                    } else {
                        float* x = c.x + (size_t)(at - n.kt_attn) * 32;
                        memcpy(x + (size_t)i * n.hidden_pad, x + (size_t)from * n.hidden_pad, 32 * 4);
                    }
                }
        });
        m = count;
    }

    // The logits, and of each block of 32 what the draws want to know, while it is in registers.
    void head() {
        if (!m) return;
        const int n_last = n.vocab - (n.nb_vocab - 1) * 32;
        multiply(norm(c.norm, kFinalNorm), m, n.kt_hidden, c.head, n.nb_vocab, c.layers[0].wqkv, n.nb_qkv, n.kt_hidden, kHead,
                 [&](int m0, int rows, int nb, const float* out) {
                     for (int i = 0; i < rows; i += 2, out += 64) {
                         const int one = m0 + i, two = i + 1 < rows ? one + 1 : one;  // an odd row comes twice
                         Block a = block_at(out), b = block_at(two > one ? out + 32 : out);
                         if (nb + 1 == n.nb_vocab) a = only(n_last, a), b = only(n_last, b);
                         float *to_a = logits(one) + nb * 32, *to_b = logits(two) + nb * 32;
                         stream(to_a, a.lo), stream(to_a + 16, a.hi);
                         stream(to_b, b.lo), stream(to_b + 16, b.hi);
                         measure(a, b, p.measures[one], p.measures[two], nb);
                     }
                 });
    }

    uint32_t* seen(int row) const { return c.seen + (size_t)row * n.seen_words; }
    float* logits(int sample) const { return c.logits + (size_t)sample * n.logit_stride; }

    void sample() {
        Drawer& drawer = *c.drawers[w.index];
        w.run((int)p.samples.size(), 1, [&](int a, int b, int) {
            for (int i = a; i < b; i++) draw(drawer, i);
        });
        clock.mark(kSample);
    }

    void draw(Drawer& drawer, int i) {
        const Segment& s = p.segs[p.samples[i]];
        const zl_columns& col = c.columns;
        const int row = s.row, made = s.start + s.len - col.prompt_len[row];  // tokens generated before this one
        int32_t token = -1;
        float logprob = 0;
        uint8_t flags = 0;
        const uint32_t* bitmap = col.penalty[row] == 1 ? nullptr : drawer.bitmap(seen(row));
        zl_sample_measured(logits(i), n.vocab, &p.measures[i], bitmap, col.temperature[row], col.top_p[row],
                           col.penalty[row], col.seed[row], (uint32_t)made, drawer.scratch(), &token, &logprob, &flags);
        if (flags & ZL_NUMERIC) {
            token = -1;
            logprob = 0;
        } else {
            c.last_token[row] = token;
            zl_filter_add(n.filter, seen(row), token);
            if (!(col.row_flags[row] & ZL_IGNORE_EOS))
                for (int32_t e : c.eos)
                    if (e == token) flags |= ZL_EOS;
            if (made + 1 >= col.max_new[row]) flags |= ZL_LENGTH;
        }
        if (flags & (ZL_EOS | ZL_LENGTH | ZL_NUMERIC)) c.done[row] = 1;
        p.slot->out_token[s.slot_index] = token;
        p.slot->out_logprob[s.slot_index] = logprob;
        p.slot->out_flags[s.slot_index] = flags;
    }

    void run() {
        if (m > 0) {
            embed();
            for (int l = 0; l < n.layers; l++) {
                const Layer& layer = c.layers[l];
                qkv(layer, norm(layer.attn_norm, kNorm));
                attend(l);
                if (l + 1 == n.layers) keep_samples();
                if (!m) break;
                add_product(c.act_attn, n.kt_attn, layer.wo, layer.bo, layer.wgu, n.nb_gate_up, kOut);
                gate_up(layer, norm(layer.mlp_norm, kMlpNorm));
                const bool last = l + 1 == n.layers;
                add_product(c.act_ffn, n.kt_ffn, layer.wdown, layer.bdown, last ? c.head : c.layers[l + 1].wqkv,
                            last ? n.nb_vocab : n.nb_qkv, kDown);
            }
            head();
            sample();
            drop_tiles();
        }
        if (w.index == 0) c.times[kTotal] = now_us() - c.times[kTotal];
    }
};

}  // namespace zl
