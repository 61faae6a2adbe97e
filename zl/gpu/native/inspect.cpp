// What the heartbeat and the fallback need of a context: its packed weights and its KV pool, as memory.
#include "attention.hpp"
#include "context.hpp"

void* zl_packed(zl_context* c, size_t* bytes) {
    *bytes = c->weights.used;
    return c->weights.base;
}

void zl_unload(zl_context* c) {
    c->team.settle(c->team.launched());
    memset(c->weights.base, 0, c->weights.used);
}

void zl_settle(zl_context* c) { c->team.settle(c->team.launched()); }

namespace {

template <class T>
void index(const zl::Sizes& n, int32_t* k, int32_t* v) {
    for (int token = 0; token < zl::kPage; token++)
        for (int dim = 0; dim < n.head_dim; dim++) {
            const int d = dim < n.half ? dim : n.half_pad + dim - n.half, at = token * n.head_dim + dim;
            if (n.kv8) {
                k[at] = (int32_t)zl::k8_at(n.head_pad, d, token);
                v[at] = (int32_t)zl::v8_at(n.head_pad, d, token);
                continue;
            }
            k[at] = (int32_t)zl::k_at<T>(n.head_pad, d, token);
            v[at] = (int32_t)((size_t)zl::kPage * n.head_pad + zl::v_at<T>(d, token));
        }
}

}  // namespace

void* zl_pool(zl_context* c, int32_t* k_at, int32_t* v_at) {
    if (c->config.is_bf16)
        index<zl::bf16>(c->n, k_at, v_at);
    else
        index<float>(c->n, k_at, v_at);
    return c->pool.base;
}
