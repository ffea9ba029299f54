#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// Mamba-2's scan with everything around it (methods.md, section 1; arXiv 2405.21060), for token i,
// head h of group g = h / (heads / groups), channel p of the head, state n:
//   delta[i, h] = clamp(softplus(dt[i, h] + dt_bias[h]), delta_min, delta_max)
//   state[i, h] = exp(delta[i, h] A[h]) state[i-1, h] + delta[i, h] B[i, g] x[i, h]^T      [n, p]
//   y[i, h, p] = sum_n C[i, g, n] state[i, h, n, p]
//   gated[i, h, p] = (y[i, h, p] + D[h] x[i, h, p]) SiLU(z[i, h, p])
// The gated RMS norm is a call of its own (rms_norm.h).
// Layout: row-major, channels of a head contiguous, sequences packed end to end without padding.
// Precision: the state stays fp32, because rounding it every token drifts on long inputs.
// The bits of a sequence depend on that sequence alone: not on its neighbours, on the thread count
// or on where it was cut; a step is a scan of one token. The form in chunks of the paper (section
// 6) would tie them to the borders of its chunks.
struct SsdInputs {                                           // borrowed until the call returns
  int64_t heads = 0, head_dim = 0, groups = 1, d_state = 0;  // heads is a multiple of groups
  // One row of xBC after convolution and activation holds all three, behind each other.
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
  std::span<const int32_t> seq_start;  // [sequences + 1] first token of each, then `tokens`
};
struct SsdOutputs {
  float* gated = nullptr;  // [tokens, heads * head_dim]
  float* y = nullptr;      // [tokens, heads * head_dim] or null: y before D and gate
  // [sequences] pointers to [heads, d_state, head_dim]: in: the state before; out: after the last
  // token.
  std::span<float* const> ssm_state;
};
void SsdScan(ThreadPool& pool, const SsdInputs& in, const SsdOutputs& out);

// delta [tokens, heads] with the scan's own arithmetic: what a hidden-attention map needs to equal
// the scan that ran.
void SsdDelta(ThreadPool& pool, const float* dt, int64_t dt_stride, const float* dt_bias,
              float delta_min, float delta_max, int64_t tokens, int64_t heads, float* delta);

}  // namespace mambascope::kernels
