// An arena of anonymous huge-page memory handed out once, in order.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace zl {

struct Arena {
    char* base = nullptr;
    size_t size = 0, used = 0;
    bool counting = false;  // nothing is mapped: `open` and `take` only tell what would be

    bool open(size_t bytes) {
        constexpr size_t huge = (size_t)2 << 20;
        size = (bytes + 2 * huge - 1) / huge * huge;  // one spare huge page: prefetches may run past the end
        if (counting) return true;
        void* p = mmap(nullptr, size + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return false;
        map_ = p;
        mapped_ = size + huge;
        base = (char*)(((uintptr_t)p + huge - 1) / huge * huge);
        madvise(base, size, MADV_HUGEPAGE);
        return true;
    }
    // Takes `bytes`, aligned to a cache line; the caller has counted the total with `room`.
    template <class T = void>
    T* take(size_t bytes) {
        T* p = counting ? nullptr : (T*)(base + used);
        used += room(bytes);
        return p;
    }
    static size_t room(size_t bytes) { return (bytes + 63) / 64 * 64; }
    // Makes fresh memory resident: one write a small page, for the kernel clears each page that it gives.
    void touch(size_t begin, size_t end) {
        if (counting) return;
        for (size_t at = begin; at < end; at += 4096) *(volatile char*)(base + at) = 0;
    }
    void close() {
        if (map_) munmap(map_, mapped_);
        map_ = nullptr;
    }

  private:
    void* map_ = nullptr;
    size_t mapped_ = 0;
};

}  // namespace zl
