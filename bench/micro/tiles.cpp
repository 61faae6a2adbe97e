// Tile products in a loop, by the number of tiles that are live: nanoseconds a product, as TEXT lines "name p10 p50 p90".
// Words: seconds, core. Run by bench/micro/tiles.py. State: none.
#include <immintrin.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

struct alignas(64) Config {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

alignas(64) uint16_t memory[8 * 512];
const char* at(int tile) { return (const char*)(memory + tile * 512); }

// A configuration of its own for each measurement: loading it ends the life of all tiles.
void fresh() {
    Config c;
    for (int i = 0; i < 8; i++) c.bytes[i] = 64, c.rows[i] = 16;
    asm volatile("" ::"r"(&c) : "memory");
    _tile_loadconfig(&c);
}

constexpr int kTurns = 200;

template <class F>
double measure(int products, F&& turn) {
    fresh();
    const auto begun = std::chrono::steady_clock::now();
    for (int i = 0; i < kTurns; i++) turn();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begun;
    return took.count() / kTurns / products;
}

void four_live() {  // one row tile by two column tiles
    _tile_loadd(5, at(0), 64);
    _tile_loadd(6, at(1), 64);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(6, at(2), 64);
    _tile_dpbf16ps(1, 5, 6);
}
void five_live() {  // one by three
    four_live();
    _tile_loadd(6, at(3), 64);
    _tile_dpbf16ps(2, 5, 6);
}
void seven_live() {  // two by two, the right operands in one tile
    _tile_loadd(6, at(0), 64);
    _tile_loadd(4, at(1), 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, at(2), 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(6, at(3), 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_dpbf16ps(3, 5, 6);
}
void eight_live() {  // two by two, as manuals show it
    _tile_loadd(6, at(0), 64);
    _tile_loadd(4, at(1), 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, at(2), 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, at(3), 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
}

struct Case {
    const char* name;
    int products;
    void (*turn)();
    std::vector<double> ns;
};

}  // namespace

int main(int count, char** words) {
    const double seconds = count > 1 ? atof(words[1]) : 5;
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(count > 2 ? atoi(words[2]) : 0, &core);
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    if (sched_setaffinity(0, sizeof core, &core) || syscall(SYS_arch_prctl, kRequestPermission, kTileData)) {
        perror("tiles");
        return 1;
    }
    for (uint16_t& value : memory) value = 0x3c00;
    Case cases[] = {{"4", 2, four_live, {}}, {"5", 3, five_live, {}}, {"7", 4, seven_live, {}}, {"8", 4, eight_live, {}}};
    const auto begun = std::chrono::steady_clock::now();
    while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count() < seconds)
        for (Case& c : cases) c.ns.push_back(measure(c.products, c.turn));
    _tile_release();
    for (Case& c : cases) {
        std::sort(c.ns.begin(), c.ns.end());
        const size_t n = c.ns.size();
        printf("%s %.2f %.2f %.2f\n", c.name, c.ns[n / 10], c.ns[n / 2], c.ns[n * 9 / 10]);
    }
}
