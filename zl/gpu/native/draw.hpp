// One thread's access to the sampler: owns its scratch.
#pragma once
#include <new>

#include "sample.hpp"

namespace zl {

class Drawer {
  public:
    explicit Drawer(int vocab) : scratch_(zl_sample_scratch_new(vocab)) {
        if (!scratch_) throw std::bad_alloc();
    }
    ~Drawer() { zl_sample_scratch_free(scratch_); }
    Drawer(const Drawer&) = delete;
    Drawer& operator=(const Drawer&) = delete;
    zl_sample_scratch* scratch() { return scratch_; }

  private:
    zl_sample_scratch* scratch_;
};

}  // namespace zl
