#pragma once

#include <cstdint>
#include <span>

#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// The gradient of delta back through what made it, elementwise.

// Mamba-1, delta = softplus(dt): ddelta *= 1 - exp(-delta) in place, relative error <= 1e-6, which
// small steps keep too.
void SoftplusGradient(ThreadPool& pool, std::span<const float> delta, std::span<float> ddelta);

// Mamba-2, delta = clamp(softplus(dt + dt_bias), delta_min, delta_max):
//   ddt[i, h] = ddelta[i, h] sigmoid(dt[i, h] + dt_bias[h])
// where softplus lies strictly between the limits, else 0. dt [tokens, dt_stride] and ddt [tokens,
// ddt_stride] are the first `heads` of each row; ddt may be ddelta [tokens, heads].
void SsdDeltaGradient(ThreadPool& pool, const float* dt, int64_t dt_stride, const float* dt_bias,
                      float delta_min, float delta_max, int64_t tokens, int64_t heads,
                      const float* ddelta, float* ddt, int64_t ddt_stride);

}  // namespace mambascope::kernels
