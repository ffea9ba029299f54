#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace mambascope::kernels::cuda {

// A bf16 number is the upper half of the fp32 number that it stands for, so widening is exact.
using Bf16 = uint16_t;

// h[i] = embeddings[tokens[i]], rows of `cols`. All device pointers, borrowed until `stream` has
// run it. The caller has checked that 0 <= tokens[i] < the rows of `embeddings`.
absl::Status GatherRows(const float* embeddings, const int32_t* tokens, int64_t rows, int64_t cols,
                        float* h, cudaStream_t stream);
absl::Status GatherRows(const Bf16* embeddings, const int32_t* tokens, int64_t rows, int64_t cols,
                        float* h, cudaStream_t stream);

// wide[i] = narrow[i], exactly.
absl::Status Widen(const Bf16* narrow, int64_t count, float* wide, cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
