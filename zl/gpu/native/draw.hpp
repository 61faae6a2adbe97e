// One thread's access to the sampler: owns its scratch, and the room for a Bloom filter's bitmap.
#pragma once
#include <new>
#include <vector>

#include "sample.hpp"

namespace zl {

class Drawer {
  public:
    explicit Drawer(zl_filter filter)
        : filter_(filter), bitmap_(zl_filter_room(filter)), scratch_(zl_sample_scratch_new(filter.vocab)) {
        if (!scratch_) throw std::bad_alloc();
    }
    ~Drawer() { zl_sample_scratch_free(scratch_); }
    Drawer(const Drawer&) = delete;
    Drawer& operator=(const Drawer&) = delete;
    zl_sample_scratch* scratch() { return scratch_; }
    // What the sampler reads of a row's filter; overwritten by the next call.
    const uint32_t* bitmap(const uint32_t* row) { return zl_filter_bitmap(filter_, row, bitmap_.data()); }

  private:
    zl_filter filter_;
    std::vector<uint32_t> bitmap_;
    zl_sample_scratch* scratch_;
};

}  // namespace zl
