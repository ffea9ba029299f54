#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "absl/status/status.h"

// The norms of rms_norm.h, one row a warp or a block. All pointers are of the device and borrowed
// until `stream` has run the call; an error names the kernel. The bits of a row depend on that row
// and the number of columns alone.
namespace mambascope::kernels::cuda {

// u[i, m] = weight[m] h[i, m] / sqrt(mean_m(h[i, m]^2) + eps).  h, u [rows, cols]; u may be h.
absl::Status RmsNorm(const float* h, const float* weight, float eps, int64_t rows, int64_t cols,
                     float* u, cudaStream_t stream);

// The residual stream and the next layer's norm in one pass: h += out, then u = RmsNorm(h).
absl::Status AddRmsNorm(const float* out, const float* weight, float eps, int64_t rows,
                        int64_t cols, float* h, float* u, cudaStream_t stream);

// Mamba-2's norm after the gate: each of `groups` groups of neighbouring columns has its own scale.
// g, out [rows, cols]; out may be g.
absl::Status GroupRmsNorm(const float* g, const float* weight, float eps, int64_t rows,
                          int64_t cols, int64_t groups, float* out, cudaStream_t stream);

// Columns [begin, begin + cols) of a row.
struct RowPart {
  int64_t begin = 0, cols = 0;
};
// v /= sqrt(mean(v^2) + eps) for each part of each row, `stride` apart, without a weight: Falcon-
// Mamba's r, B and C in one launch. At most 3 parts.
absl::Status RmsScaleInPlace(float* v, int64_t rows, int64_t stride, std::span<const RowPart> parts,
                             float eps, cudaStream_t stream);

// h += out over `count` elements: the residual stream after the last layer.
absl::Status AddInPlace(const float* out, int64_t count, float* h, cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
