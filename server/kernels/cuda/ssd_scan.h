#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

#include "absl/status/status.h"

namespace mambascope::kernels::cuda {

// ssd_scan.h, Mamba-2's scan, on the device: same formula, layout and promise. Tokens are taken in
// their order, so the bits of a sequence depend on that sequence alone; a step is a scan of one
// token. All pointers, those inside `ssm_state` too, are of the device and borrowed until the
// stream has run the call.
struct SsdInputs {
  int64_t heads = 0, head_dim = 0, groups = 1, d_state = 0;  // groups divides heads; d_state <= 256
  const float* x = nullptr;  // [tokens, xbc_stride] the first heads * head_dim of each row
  const float* B = nullptr;  // [tokens, xbc_stride] the first groups * d_state of each row
  const float* C = nullptr;  // [tokens, xbc_stride]
  int64_t xbc_stride = 0;
  const float* dt = nullptr;  // [tokens, dt_stride] the first `heads` of each row, without bias
  int64_t dt_stride = 0;
  const float* dt_bias = nullptr;  // [heads]
  float delta_min = 0, delta_max = std::numeric_limits<float>::infinity();
  const float* A = nullptr;  // [heads] -exp(A_log), so < 0
  const float* D = nullptr;  // [heads] the skip connection
  const float* z =
      nullptr;  // [tokens, z_stride] the gate before SiLU, heads * head_dim of each row
  int64_t z_stride = 0;
  int64_t sequences = 0;
  const int32_t* seq_start = nullptr;  // [sequences + 1] first token of each, then `tokens`
};
struct SsdOutputs {
  float* gated = nullptr;  // [tokens, heads * head_dim]
  float* y = nullptr;      // [tokens, heads * head_dim] or null: y before D and gate
  // [sequences] pointers to [heads, d_state, head_dim], in and out.
  float* const* ssm_state = nullptr;
};
absl::Status SsdScan(const SsdInputs& in, const SsdOutputs& out, cudaStream_t stream);

// delta [tokens, heads] with the scan's own arithmetic, for hidden-attention maps.
absl::Status SsdDelta(const float* dt, int64_t dt_stride, const float* dt_bias, float delta_min,
                      float delta_max, int64_t tokens, int64_t heads, float* delta,
                      cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
