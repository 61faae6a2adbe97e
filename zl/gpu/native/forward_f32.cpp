// The step in f32.
#include "forward.hpp"

namespace zl {

void forward_f32(zl_context& c, Worker& w) { Forward<float>(c, w).run(); }

}  // namespace zl
