// The step in bf16.
#include "forward.hpp"

namespace zl {

void forward_bf16(zl_context& c, Worker& w) { Forward<bf16>(c, w).run(); }

}  // namespace zl
