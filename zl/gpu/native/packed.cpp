// Packed weights to and from a file, so that a start neither dequantises nor packs.
// Nothing here knows a layout: the file is the arena that the packing filled. What lies in it where follows from the
// config alone, but for the biases, whose room is taken when they come: their offsets are kept.
// Whoever reads a file checks its hash; the header only proves that both contexts are of one mould.
#include <unistd.h>

#include <vector>

#include "context.hpp"

namespace {

constexpr uint64_t kMagic = 0x31306b6361706c7aull;  // "zlpack01"
constexpr size_t kFilePage = 4096;
constexpr uint64_t kNone = ~0ull;

struct Mould {
    uint64_t magic, layers, elem, model_len, size, used, embed, norm, cos, sin;
};

uint64_t offset(const zl_context& c, const void* p) { return p ? (uint64_t)((const char*)p - c.weights.base) : kNone; }

Mould mould(const zl_context& c) {
    return {kMagic, (uint64_t)c.layers.size(), c.n.elem, (uint64_t)c.n.model_len, c.weights.size, c.weights.used,
            offset(c, c.embed), offset(c, c.norm), offset(c, c.cos), offset(c, c.sin)};
}

template <class F>
void each_bias(zl_context& c, F&& f) {
    for (zl::Layer& l : c.layers)
        for (float** bias : {&l.bqkv, &l.bo, &l.bgu, &l.bdown}) f(*bias);
}

size_t head_bytes(const zl_context& c) {
    const size_t bytes = sizeof(Mould) + c.layers.size() * 4 * sizeof(uint64_t);
    return (bytes + kFilePage - 1) / kFilePage * kFilePage;
}

bool write_all(int fd, const char* from, size_t n) {
    while (n) {
        const ssize_t done = write(fd, from, n < ((size_t)1 << 30) ? n : (size_t)1 << 30);
        if (done <= 0) return false;
        from += done, n -= (size_t)done;
    }
    return true;
}

bool read_all(int fd, char* to, size_t n, size_t at) {
    while (n) {
        const ssize_t done = pread(fd, to, n < ((size_t)1 << 30) ? n : (size_t)1 << 30, (off_t)at);
        if (done <= 0) return false;
        to += done, at += (size_t)done, n -= (size_t)done;
    }
    return true;
}

}  // namespace

int64_t zl_packed_bytes(zl_context* c) { return (int64_t)(head_bytes(*c) + c->weights.used); }

int zl_export(zl_context* c, int fd) {
    std::vector<char> head(head_bytes(*c));
    const Mould m = mould(*c);
    memcpy(head.data(), &m, sizeof m);
    char* at = head.data() + sizeof m;
    each_bias(*c, [&](float*& bias) {
        const uint64_t where = offset(*c, bias);
        memcpy(at, &where, sizeof where);
        at += sizeof where;
    });
    return write_all(fd, head.data(), head.size()) && write_all(fd, c->weights.base, c->weights.used);
}

int zl_import(zl_context* c, int fd, int64_t begin) {
    std::vector<char> head(head_bytes(*c));
    Mould found, want = mould(*c);
    if (!read_all(fd, head.data(), head.size(), (size_t)begin)) return 0;
    memcpy(&found, head.data(), sizeof found);
    const uint64_t used = found.used;
    if (used < want.used || used > want.size) return 0;
    found.used = want.used;  // a packed model has also taken what its biases need
    if (memcmp(&found, &want, sizeof want)) return 0;
    constexpr size_t part = (size_t)4 << 20;
    const size_t body = (size_t)begin + head.size();
    const int parts = (int)((used + part - 1) / part);
    std::vector<char> good((size_t)parts, 0);
    zl::scatter(c->config.n_threads, parts, [&](int a, int b) {
        for (int i = a; i < b; i++) {
            const size_t first = (size_t)i * part, end = first + part < used ? first + part : used;
            good[(size_t)i] = read_all(fd, c->weights.base + first, end - first, body + first);
        }
    });
    for (char g : good)
        if (!g) return 0;
    const char* at = head.data() + sizeof found;
    bool fits = true;
    each_bias(*c, [&](float*& bias) {
        uint64_t where;
        memcpy(&where, at, sizeof where);
        at += sizeof where;
        fits = fits && (where == kNone || where < used);
        bias = where == kNone || !fits ? nullptr : (float*)(c->weights.base + where);
    });
    c->weights.used = used;
    return fits;
}
