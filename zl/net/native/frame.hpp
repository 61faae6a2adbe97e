// The frame of one new token (zl.Response), byte for byte as protobuf writes it: fields in the order of their numbers,
// what is zero or empty left out but for the token. Free of Python; codec.encode_token is the slow twin.
#pragma once

#include <cstring>

#include "request.hpp"

namespace zl::wire {

struct Token {
    uint64_t request_id, seed;  // 0: not said
    int32_t id;
    bool has_logprob;
    float logprob;
    Bytes text;
};

// What stands before and behind the text.
class TokenFrame {
  public:
    explicit TokenFrame(const Token& token) : text_(token.text) {
        uint8_t digits[10];
        // A negative id is as long as its 64 bits: int32 is written that way.
        const size_t n = varint(digits, static_cast<uint64_t>(int64_t{token.id}));
        head(0x0A), head(static_cast<uint8_t>(n));
        std::memcpy(head_ + n_head_, digits, n);
        n_head_ += n;
        if (token.has_logprob) {
            uint32_t bits;
            std::memcpy(&bits, &token.logprob, 4);
            head(0x12), head(4);
            for (int i = 0; i < 32; i += 8) head(static_cast<uint8_t>(bits >> i));
        }
        if (token.request_id) {
            head(0x20);
            n_head_ += varint(head_ + n_head_, token.request_id);
        }
        if (text_.size) {
            head(0x2A);
            n_head_ += varint(head_ + n_head_, text_.size);
        }
        if (token.seed) {
            tail_[n_tail_++] = 0x50;
            n_tail_ += varint(tail_ + n_tail_, token.seed);
        }
        for (size_t i = 0; i < kHeader; ++i) head_[i] = static_cast<uint8_t>((size() - kHeader) >> (24 - 8 * i));
    }

    size_t size() const { return n_head_ + text_.size + n_tail_; }

    void write(uint8_t* out) const {
        std::memcpy(out, head_, n_head_);
        if (text_.size) std::memcpy(out + n_head_, text_.data, text_.size);
        std::memcpy(out + n_head_ + text_.size, tail_, n_tail_);
    }

  private:
    static constexpr size_t kHeader = 4;  // HEADER_BYTES: the payload's length, big-endian

    void head(uint8_t byte) { head_[n_head_++] = byte; }

    static size_t varint(uint8_t* out, uint64_t value) {
        size_t n = 0;
        for (; value >= 0x80; value >>= 7) out[n++] = static_cast<uint8_t>(value | 0x80);
        out[n++] = static_cast<uint8_t>(value);
        return n;
    }

    const Bytes text_;
    uint8_t head_[kHeader + 12 + 6 + 11 + 11], tail_[11];
    size_t n_head_ = kHeader, n_tail_ = 0;
};

}  // namespace zl::wire
