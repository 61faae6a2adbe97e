// Runs zl/net/native/request.hpp and frame.hpp under the sanitizers that test_native.py compiles it with: reads length and payload (as
// frames) from stdin until it ends, answers each with a byte, 1 for a valid request. Each payload has an allocation of
// its own, exactly as large, so that reading a byte beside it is an error.
#include <cstdio>
#include <cstdlib>

#include "frame.hpp"

int main() {
    const zl::wire::Limits limits{2, 3, 16, 4, 64, 100000000, 1000000, 100000000};
    uint8_t header[4];
    while (std::fread(header, 1, 4, stdin) == 4) {
        const size_t size = size_t{header[0]} << 24 | header[1] << 16 | header[2] << 8 | header[3];
        auto* payload = static_cast<uint8_t*>(std::malloc(size));
        if (std::fread(payload, 1, size, stdin) != size) return 1;
        zl::wire::Request found;
        const bool valid = zl::wire::read(payload, size, limits, found);
        std::putchar(valid);
        if (valid) {  // any frame will do, written into exactly its size
            float logprob;
            std::memcpy(&logprob, &found.temperature, 4);
            const zl::wire::Token token{found.request_id, found.seed, static_cast<int32_t>(found.deadline_ms),
                                        found.has_temperature, logprob, found.system};
            const zl::wire::TokenFrame frame(token);
            auto* out = static_cast<uint8_t*>(std::malloc(frame.size()));
            frame.write(out);
            std::free(out);
        }
        std::free(payload);
    }
}
