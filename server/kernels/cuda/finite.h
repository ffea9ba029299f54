#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace mambascope::kernels::cuda {

// flags[owner[i]] = 1 where row i of `values` [rows, cols] holds a NaN or an infinity; the other
// flags stay as they are. Rows may share an owner: all of them write the same number, so nothing is
// atomic and the result is the same each time. All device pointers, borrowed until `stream` has run
// the call.
absl::Status FlagNonFinite(const float* values, int64_t rows, int64_t cols, const int32_t* owner,
                           int32_t* flags, cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
