#pragma once

#include <cstdint>
#include <span>

#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// Selective scan with everything around it (methods.md, section 1; Mamba, arXiv 2312.00752, alg.
// 2), for token i, channel d, state n:
//   delta[i, d]    = softplus(dt[i, d])
//   state[i, n, d] = exp(delta[i, d] A[n, d]) state[i-1, n, d] + delta[i, d] B[i, n] x[i, d]
//   y[i, d]        = sum_n C[i, n] state[i, n, d]
//   gated[i, d]    = (y[i, d] + D[d] x[i, d]) SiLU(z[i, d])
// Layout: row-major, channels contiguous (one register holds neighbouring channels), sequences
// packed end to end without padding. Nothing of size [tokens, d_inner, d_state] is ever stored.
// Precision: the state stays fp32, because rounding it every token drifts on long inputs.
// The bits of a sequence depend on that sequence alone: not on its neighbours, on the thread count
// or on where it was cut; a step is a scan of one token.
struct ScanInputs {  // borrowed until the call returns
  int64_t d_inner = 0, d_state = 0;
  const float* x = nullptr;   // [tokens, d_inner] after convolution and activation
  const float* dt = nullptr;  // [tokens, d_inner] before softplus, bias included
  const float* z = nullptr;   // [tokens, z_stride] the gate before SiLU
  int64_t z_stride = 0;
  const float* A = nullptr;  // [d_state, d_inner] -exp(A_log) transposed, so < 0
  const float* B = nullptr;  // [tokens, bc_stride] the first d_state of each row
  const float* C = nullptr;  // [tokens, bc_stride]
  int64_t bc_stride = 0;
  const float* D = nullptr;            // [d_inner] the skip connection
  std::span<const int32_t> seq_start;  // [sequences + 1] first token of each, then `tokens`
};
struct ScanOutputs {
  float* gated = nullptr;  // [tokens, d_inner]
  float* y = nullptr;      // [tokens, d_inner] or null: y before D and gate
  // [sequences] pointers to [d_state, d_inner]: in: the state before; out: after the last token.
  std::span<float* const> ssm_state;
};
void SelectiveScan(ThreadPool& pool, const ScanInputs& in, const ScanOutputs& out);

// delta = softplus(dt), elementwise with the scan's own arithmetic: what a hidden-attention map
// needs to equal the scan that ran. `delta` may be `dt`.
void Softplus(ThreadPool& pool, std::span<const float> dt, std::span<float> delta);

}  // namespace mambascope::kernels
