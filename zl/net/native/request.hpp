// What a valid GENERATE request says (zl.proto, and the field rules of rules.check_request), or that we are not sure.
//
// Only one verdict is given here: "this is valid, and protobuf reads the same fields". Whatever is unusual, damaged or
// against a rule is left to codec.py, which accepts or refuses it: no refusal has two sources. Free of Python, so that
// it can be tested under sanitizers; allocates nothing and reads only the payload's bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace zl::wire {

// As in library.py; the values are those of codec.py, shapes.py and the enums of messages.py.
struct Limits {
    uint32_t encodings, types;  // how many values are known
    uint32_t turns;             // up to here the last turn must be the user's
    uint32_t stops, stop_bytes;
    uint32_t temperature, top_p, penalty;  // largest, in millionths
};

struct Bytes {
    const uint8_t* data;
    size_t size;
};

constexpr uint32_t kTurns = 64;  // MANY_MESSAGES: what a policy may allow
constexpr uint32_t kStops = 8;
constexpr size_t kTokenBytes = 4;
constexpr uint32_t kTokens = 1;  // of Encoding

struct Request {
    uint64_t request_id = 0, seed = 0;
    uint32_t encoding = 0, type = 0, max_tokens = 0, deadline_ms = 0;
    uint32_t temperature = 0, top_p = 0, penalty = 0;  // in millionths
    bool has_temperature = false, has_top_p = false, has_penalty = false, has_seed = false;
    bool ignore_eos = false, logprobs = false;
    Bytes system{}, context{}, auth_token{};
    uint32_t n_turns = 0, n_stops = 0;
    Bytes turns[kTurns], stops[kStops];  // the first n_turns and n_stops are set
};

constexpr uint64_t kHighBits = 0x8080808080808080u;

inline uint64_t eight(const uint8_t* p) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    return word;
}

// Without a branch on what is read, so that the compiler takes vectors.
inline bool is_ascii(const uint8_t* p, size_t n) {
    uint64_t seen = 0;
    for (; n >= 64; p += 64, n -= 64) {
        uint64_t one = 0, other = 0;  // two chains, which do not wait for each other
        for (size_t i = 0; i < 32; i += 8) {
            one |= eight(p + i);
            other |= eight(p + i + 32);
        }
        seen |= one | other;
    }
    for (; n >= 8; p += 8, n -= 8) seen |= eight(p);
    for (; n; ++p, --n) seen |= *p;
    return !(seen & kHighBits);
}

// Well-formed UTF-8 as the Unicode standard has it (table 3-7), which is what Python's strict decoder takes: no
// surrogates, nothing above U+10FFFF, no character longer than needed.
inline bool is_utf8(Bytes text) {
    const uint8_t* p = text.data;
    const uint8_t* const end = p + text.size;
    if (is_ascii(p, text.size)) return true;
    const auto continues = [](uint8_t byte, uint8_t low, uint8_t high) { return byte >= low && byte <= high; };
    while (p != end) {
        const uint8_t lead = *p;
        if (lead < 0x80) {
            p += end - p >= 8 && !(eight(p) & kHighBits) ? 8 : 1;
        } else if (lead < 0xC2) {  // a continuation, or a character of one byte in two
            return false;
        } else if (lead < 0xE0) {
            if (end - p < 2 || !continues(p[1], 0x80, 0xBF)) return false;
            p += 2;
        } else if (lead < 0xF0) {
            const uint8_t low = lead == 0xE0 ? 0xA0 : 0x80, high = lead == 0xED ? 0x9F : 0xBF;
            if (end - p < 3 || !continues(p[1], low, high) || !continues(p[2], 0x80, 0xBF)) return false;
            p += 3;
        } else if (lead < 0xF5) {
            const uint8_t low = lead == 0xF0 ? 0x90 : 0x80, high = lead == 0xF4 ? 0x8F : 0xBF;
            if (end - p < 4 || !continues(p[1], low, high)) return false;
            if (!continues(p[2], 0x80, 0xBF) || !continues(p[3], 0x80, 0xBF)) return false;
            p += 4;
        } else {
            return false;
        }
    }
    return true;
}

// A payload and how far it has been read. Each read says whether it could; numbers must be in their shortest form.
class Reader {
  public:
    Reader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

    bool done() const { return at_ == end_; }

    bool varint(uint64_t& value) {
        value = 0;
        for (uint32_t shift = 0; shift < 64 && at_ != end_; shift += 7) {
            const uint8_t byte = *at_++;
            if (shift == 63 && byte > 1) return false;  // above 64 bits
            value |= uint64_t{byte & 0x7Fu} << shift;
            if (byte < 0x80) return byte || !shift;
        }
        return false;
    }

    bool varint32(uint32_t& value) {
        uint64_t wide;
        if (!varint(wide) || wide > UINT32_MAX) return false;
        value = static_cast<uint32_t>(wide);
        return true;
    }

    bool flag(bool& value) {
        uint64_t wide;
        if (!varint(wide) || wide > 1) return false;
        value = wide;
        return true;
    }

    template <class Int>
    bool fixed(Int& value) {
        if (static_cast<size_t>(end_ - at_) < sizeof(Int)) return false;
        value = 0;
        for (size_t i = 0; i < sizeof(Int); ++i) value |= Int{at_[i]} << (8 * i);
        at_ += sizeof(Int);
        return true;
    }

    bool bytes(Bytes& value) {
        uint64_t size;
        if (!varint(size) || size > static_cast<size_t>(end_ - at_)) return false;
        value = {at_, static_cast<size_t>(size)};
        at_ += size;
        return true;
    }

  private:
    const uint8_t* at_;
    const uint8_t* const end_;
};

// Read the fields, whatever they say; false: not sure.
inline bool fields(const uint8_t* payload, size_t size, Request& found) {
    enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
    Reader in(payload, size);
    uint32_t seen = 0, key, entries = 0, operation = 0;
    while (!in.done()) {
        if (!in.varint32(key)) return false;
        const uint32_t number = key >> 3;
        if (number < 32 && number != 2 && number != 12) {
            if (seen >> number & 1) return false;  // the last would count
            seen |= 1u << number;
        }
        bool read = false;
        switch (key) {
            case 1 << 3 | kBytes: read = in.bytes(found.system); break;
            case 2 << 3 | kBytes: {
                Bytes turn{};
                read = in.bytes(turn);
                if (read && entries < kTurns) {
                    found.turns[entries++] = turn;
                    if (turn.size) found.n_turns = entries;  // empty entries at the end do not count
                } else if (turn.size) {
                    return false;
                }
                break;
            }
            case 3 << 3 | kFixed32: read = found.has_temperature = in.fixed(found.temperature); break;
            case 4 << 3 | kFixed32: read = found.has_top_p = in.fixed(found.top_p); break;
            case 5 << 3 | kFixed32: read = found.has_penalty = in.fixed(found.penalty); break;
            case 6 << 3 | kVarint: read = in.varint32(found.max_tokens); break;
            case 7 << 3 | kVarint: read = in.varint32(found.type); break;
            case 8 << 3 | kVarint: read = in.varint(found.request_id); break;
            case 9 << 3 | kVarint: read = in.varint32(operation) && !operation; break;  // GENERATE
            case 10 << 3 | kVarint: read = in.varint32(found.encoding); break;
            case 11 << 3 | kFixed64: read = found.has_seed = in.fixed(found.seed); break;
            case 12 << 3 | kBytes: read = found.n_stops < kStops && in.bytes(found.stops[found.n_stops++]); break;
            case 13 << 3 | kBytes: read = in.bytes(found.context); break;
            case 14 << 3 | kBytes: read = in.bytes(found.auth_token); break;
            case 15 << 3 | kVarint: read = in.varint32(found.deadline_ms); break;
            case 16 << 3 | kVarint: read = in.flag(found.ignore_eos); break;
            case 17 << 3 | kVarint: read = in.flag(found.logprobs); break;
        }
        if (!read) return false;
    }
    return true;
}

// The rules of rules.check_request with max_messages=None.
inline bool follows_the_rules(const Request& found, const Limits& limits) {
    if (found.encoding >= limits.encodings || found.type >= limits.types) return false;
    if (!found.n_turns || (found.n_turns % 2 == 0 && found.n_turns <= limits.turns)) return false;
    if (found.n_stops > limits.stops) return false;
    for (uint32_t i = 0; i < found.n_stops; ++i) {
        const Bytes stop = found.stops[i];
        if (!stop.size || stop.size > limits.stop_bytes || !is_utf8(stop)) return false;
    }
    const bool text = !found.encoding;
    const auto good = [text](Bytes field) { return text ? is_utf8(field) : field.size % kTokenBytes == 0; };
    if (!good(found.system) || !good(found.context)) return false;
    for (uint32_t i = 0; i < found.n_turns; ++i) {
        if (!good(found.turns[i])) return false;
    }
    return (!found.has_temperature || found.temperature <= limits.temperature) &&
           (!found.has_top_p || found.top_p <= limits.top_p) &&
           (!found.has_penalty || (found.penalty && found.penalty <= limits.penalty));
}

// Read a payload that is surely a valid request into a fresh `found`; false: not sure.
inline bool read(const uint8_t* payload, size_t size, const Limits& limits, Request& found) {
    return fields(payload, size, found) && follows_the_rules(found, limits);
}

}  // namespace zl::wire
