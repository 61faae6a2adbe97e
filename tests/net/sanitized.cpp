// Runs zl/net/native/request.hpp under the sanitizers that test_native.py compiles it with: reads length and payload (as
// frames) from stdin until it ends, answers each with a byte, 1 for a valid request. Each payload has an allocation of
// its own, exactly as large, so that reading a byte beside it is an error.
#include <cstdio>
#include <cstdlib>

#include "request.hpp"

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
        std::free(payload);
    }
}
