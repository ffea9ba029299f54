#pragma once

#include <cstdint>

#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// u[i, m] = weight[m] h[i, m] / sqrt(mean_m(h[i, m]^2) + eps), row by row; the bits of a row depend
// on that row alone. h, u [rows, cols] dense; u may be h.
void RmsNorm(ThreadPool& pool, const float* h, const float* weight, float eps, int64_t rows,
             int64_t cols, float* u);

// out[i, c] = weight[c] g[i, c] / sqrt(mean over c's group of g^2 + eps), where a group is cols /
// groups neighbouring channels: Mamba-2's norm after the gate (methods.md, section 1). g, out
// [rows, cols] dense; out may be g. The bits of a row depend on that row alone.
void GroupRmsNorm(ThreadPool& pool, const float* g, const float* weight, float eps, int64_t rows,
                  int64_t cols, int64_t groups, float* out);

// v[i, m] /= sqrt(mean_m(v[i, m]^2) + eps) for the first `cols` of each row, `stride` apart,
// without a weight: Falcon-Mamba's r, B and C. The rest of a row stays as it is.
void RmsScaleInPlace(ThreadPool& pool, float* v, int64_t rows, int64_t cols, int64_t stride,
                     float eps);

// h[i] += out[i] over `count` elements: the residual stream.
void AddInPlace(ThreadPool& pool, const float* out, int64_t count, float* h);

}  // namespace mambascope::kernels
