#pragma once

#include <cstdint>

#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// u[i, m] = weight[m] h[i, m] / sqrt(mean_m(h[i, m]^2) + eps), row by row; the bits of a row depend
// on that row alone. h, u [rows, cols] dense; u may be h.
void RmsNorm(ThreadPool& pool, const float* h, const float* weight, float eps, int64_t rows,
             int64_t cols, float* u);

// h[i] += out[i] over `count` elements: the residual stream.
void AddInPlace(ThreadPool& pool, const float* out, int64_t count, float* h);

}  // namespace mambascope::kernels
