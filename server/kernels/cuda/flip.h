#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace mambascope::kernels::cuda {

// flip.h on the device: sequences read from their ends. Rows of `cols` numbers, dense; `seq_start`
// [sequences + 1]; `sequence_of` [rows] names each row's sequence. All device pointers, borrowed
// until `stream` has run the call.

// out[first + i] = in[last - 1 - i] for each sequence [first, last). `out` must not overlap `in`.
absl::Status FlipRows(const float* in, int64_t rows, int64_t cols, const int32_t* seq_start,
                      const int32_t* sequence_of, float* out, cudaStream_t stream);

// sum[first + i] = scale (sum[first + i] + backward[last - 1 - i])
absl::Status AddFlipped(const float* backward, int64_t rows, int64_t cols, const int32_t* seq_start,
                        const int32_t* sequence_of, float scale, float* sum, cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
