#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace mambascope::kernels::cuda {

// The mean over all tokens of a sequence so far, carried from piece to piece:
//   sums[s][m] += rows[i, m] for the tokens i of piece s, one after the other, in double
//   means[s, m] = sums[s][m] / counts[s]
// so that a cut changes no bit. rows [seq_start[sequences], cols] dense; `sums` [sequences]
// pointers to [cols]; counts [sequences] tokens added so far, these included, > 0; means
// [sequences, cols]. All device pointers, borrowed until `stream` has run the call.
absl::Status PoolMeans(const float* rows, int64_t cols, int64_t sequences, const int32_t* seq_start,
                       double* const* sums, const int64_t* counts, float* means,
                       cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
