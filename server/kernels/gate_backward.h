#pragma once

#include <cstdint>

#include "server/base/thread_pool.h"
#include "server/kernels/backward_rule.h"

namespace mambascope::kernels {

// The gate backwards: gated = yd SiLU(z) with yd = y + D x, elementwise over [tokens, d_inner].
//   kGradient    dyd = dgated SiLU(z)      dz = dgated yd SiLU'(z)
//   kRelevance   dyd = dgated SiLU(z) / 2  dz = dgated yd sigmoid(z) / 2
// In the second, sigmoid(z) = SiLU(z) / z is frozen and each factor of the product gets half of the
// gradient (methods.md, section 6). Bits depend on each element alone.
struct GateBackwardInputs {  // borrowed until the call returns
  int64_t tokens = 0, d_inner = 0;
  BackwardRule rule = BackwardRule::kGradient;
  const float* dgated = nullptr;  // [tokens, d_inner]
  const float* y = nullptr;       // [tokens, d_inner] the scan's output without the D term
  const float* x = nullptr;       // [tokens, x_stride], the first d_inner of each row
  int64_t x_stride = 0;
  const float* z = nullptr;  // [tokens, z_stride], likewise
  int64_t z_stride = 0;
  const float* D = nullptr;       // [d_inner / channels_per_skip]
  int64_t channels_per_skip = 1;  // > 1: Mamba-2's D of a head; divides d_inner
};
struct GateBackwardOutputs {
  float* dyd = nullptr;  // [tokens, d_inner]; may be dgated
  float* dz = nullptr;   // [tokens, dz_stride], the first d_inner of each row; the rest stays
  int64_t dz_stride = 0;
};
void GateBackward(ThreadPool& pool, const GateBackwardInputs& in, const GateBackwardOutputs& out);

}  // namespace mambascope::kernels
