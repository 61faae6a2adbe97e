// The two filters of the repetition penalty, to the bits of zl/sampling/filter.py, which says what they are.
#include <string.h>

#include "sample.hpp"

namespace {

constexpr int kBloomWords = 1024, kLine = 16;
constexpr uint32_t kHashes[] = {0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xCC9E2D51};

// A line as one value (GCC's vector extension, also clang's), at any address of a word.
typedef uint32_t Line __attribute__((vector_size(4 * kLine), aligned(4), may_alias));

struct Place {
    int line;       // first word
    uint32_t turn;  // of every word, in bits
};
// Where a hash puts a group of 32 * kLine neighbouring ids.
inline Place place(uint32_t hash, int group) {
    const uint32_t product = (uint32_t)(group + 1) * hash;
    return {(int)(product >> 26) * kLine, product >> 21 & 31};
}

}  // namespace

extern "C" {

int zl_filter_words(zl_filter f) { return f.bloom ? kBloomWords : (f.vocab + 31) / 32; }

int zl_filter_room(zl_filter f) { return f.bloom ? (f.vocab + 32 * kLine - 1) / (32 * kLine) * kLine : 0; }

void zl_filter_add(zl_filter f, uint32_t* row, int32_t id) {
    if (!f.bloom) {
        row[id >> 5] |= 1u << (id & 31);
        return;
    }
    for (uint32_t hash : kHashes) {
        const Place at = place(hash, id / (32 * kLine));
        row[at.line + id / 32 % kLine] |= 1u << ((id + at.turn) & 31);
    }
}

void zl_filter_build(zl_filter f, uint32_t* row, const int32_t* ids, int n) {
    memset(row, 0, (size_t)zl_filter_words(f) * sizeof(uint32_t));
    for (int i = 0; i < n; i++)
        if ((uint32_t)ids[i] < (uint32_t)f.vocab) zl_filter_add(f, row, ids[i]);
}

const uint32_t* zl_filter_bitmap(zl_filter f, const uint32_t* row, uint32_t* room) {
    if (!f.bloom) return row;
    const int words = zl_filter_room(f);
    for (int b = 0; b < words; b += kLine) {
        Line found = ~Line{};
        for (uint32_t hash : kHashes) {
            const Place at = place(hash, b / kLine);
            const Line line = *(const Line*)(row + at.line);
            found &= line >> at.turn | line << (-at.turn & 31);
        }
        *(Line*)(room + b) = found;
    }
    if (f.vocab % 32) room[f.vocab / 32] &= (1u << f.vocab % 32) - 1;
    return room;
}
}
