#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace mambascope::kernels::cuda {

// selective_scan.h on the device: same formula, layout and promise. Tokens are taken in their
// order, so the bits of a sequence depend on that sequence alone: not on its neighbours or on where
// it was cut; a step is a scan of one token. All pointers, those inside `ssm_state` too, are of the
// device and borrowed until the stream has run the call.
struct ScanInputs {
  int64_t d_inner = 0, d_state = 0;  // d_state <= 256
  const float* x = nullptr;          // [tokens, d_inner] after convolution and activation
  const float* dt = nullptr;         // [tokens, d_inner] before softplus
  const float* dt_bias = nullptr;    // [d_inner] added to dt, or null where dt already holds it
  const float* z = nullptr;          // [tokens, z_stride] the gate before SiLU
  int64_t z_stride = 0;
  const float* A = nullptr;  // [d_state, d_inner] -exp(A_log) transposed, so < 0
  const float* B = nullptr;  // [tokens, bc_stride] the first d_state of each row
  const float* C = nullptr;  // [tokens, bc_stride]
  int64_t bc_stride = 0;
  const float* D = nullptr;  // [d_inner] the skip connection
  int64_t sequences = 0;
  const int32_t* seq_start = nullptr;  // [sequences + 1] first token of each, then `tokens`
};
struct ScanOutputs {
  float* gated = nullptr;  // [tokens, d_inner]
  float* y = nullptr;      // [tokens, d_inner] or null: y before D and gate
  float* delta = nullptr;  // [tokens, d_inner] or null: softplus(dt + dt_bias), what a map needs
  // [sequences] pointers to [d_state, d_inner]: in: the state before; out: after the last token.
  float* const* ssm_state = nullptr;
};
absl::Status SelectiveScan(const ScanInputs& in, const ScanOutputs& out, cudaStream_t stream);

// delta = softplus(dt + dt_bias) with the scan's own arithmetic, [tokens, d_inner]; `dt_bias` may
// be null, `delta` may be `dt`.
absl::Status Softplus(const float* dt, const float* dt_bias, int64_t tokens, int64_t d_inner,
                      float* delta, cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
