#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

// The elementwise ends of Gemm::Linear: for gemm.cc.
namespace mambascope::kernels::cuda {

constexpr int64_t kParts = 3;  // of 8 bits each: together the 24 of an fp32 number

// parts[3 m + p, k] for p = 0, 1, 2: bf16 numbers that add up to x[m, k], the largest first.
// Columns from `cols` to `parts_stride` become 0.
absl::Status SplitRows(const float* x, int64_t x_stride, int64_t rows, int64_t cols,
                       int64_t parts_stride, uint16_t* parts, cudaStream_t stream);

// y[m, n] = (sums[3 m + 2, n] + sums[3 m + 1, n]) + sums[3 m, n] (+ bias[n]), the small ones first.
absl::Status JoinRows(const float* sums, const float* bias, int64_t rows, int64_t cols, float* y,
                      int64_t y_stride, cudaStream_t stream);

// y[m, n] += bias[n]
absl::Status AddBias(const float* bias, int64_t rows, int64_t cols, float* y, int64_t y_stride,
                     cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
