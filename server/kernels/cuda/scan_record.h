#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace mambascope::kernels::cuda {

// What an explanation needs of a scan that has run, gathered from where it stands:
//   selective[r] = the numbers of token tokens[r] from which its scan parameters follow
//   x_checked[r, c] = x[t, d], y_checked[r, c] = y[t, d] + D[d / channels_per_skip] x[t, d]
//     with t = tokens[r], d = channels[c]
// All device pointers, borrowed until `stream` has run the call.
struct ScanRecord {
  const int32_t* tokens = nullptr;  // [count]
  int64_t count = 0;
  // The selective numbers of a token stand in one or two places.
  struct Part {
    const float* values = nullptr;  // [all tokens, stride], the first `cols` of each row
    int64_t stride = 0, cols = 0;
  };
  Part parts[2];
  const float* x = nullptr;  // [all tokens, x_stride]
  int64_t x_stride = 0;
  const float* y = nullptr;  // [all tokens, y_stride]
  int64_t y_stride = 0;
  const float* D = nullptr;
  int64_t channels_per_skip = 1;
  const int32_t* channels = nullptr;  // [checked]
  int64_t checked = 0;
};
struct ScanRecordOutputs {
  float* selective = nullptr;  // [count, parts[0].cols + parts[1].cols]
  float* x_checked = nullptr;  // [count, checked]
  float* y_checked = nullptr;  // [count, checked]
};
absl::Status RecordScan(const ScanRecord& in, const ScanRecordOutputs& out, cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
