#pragma once

#include <cstdint>

#include "server/base/thread_pool.h"
#include "server/kernels/activation.h"
#include "server/kernels/backward_rule.h"

// The depthwise causal convolution and its activation (causal_conv1d.h) backwards, for one whole
// sequence. Row-major. Bits depend neither on threads nor on what lies beside the sequence.
namespace mambascope::kernels {

// dc[i, d] = dx[i, d] f'(c[i, d]), or with kRelevance dx[i, d] phi(c[i, d]), phi(c) = f(c) / c: the
// sigmoid for SiLU, [c > 0] for ReLU, 1 for the identity. `c` are the convolution's outputs before
// the activation: CausalConv1d with the identity. All [tokens, channels] dense; dc may be dx or c.
void ActivationGradient(ThreadPool& pool, const float* c, const float* dx, int64_t tokens,
                        int64_t channels, Activation activation, BackwardRule rule, float* dc);

// dx_in[j, d] = sum_{k < taps, j + k < tokens} weight[d, taps - 1 - k] dc[j + k, d]
struct ConvBackwardInputs {  // borrowed until the call returns
  int64_t tokens = 0;
  int64_t channels = 0, taps = 0;  // taps >= 1
  const float* dc = nullptr;       // [tokens, channels] before the activation
  const float* weight = nullptr;   // [channels, taps] as in the checkpoint
};
// dx_in [tokens, dx_stride], the first `channels` of each row, the rest stays; must not overlap dc.
void CausalConv1dBackward(ThreadPool& pool, const ConvBackwardInputs& in, float* dx_in,
                          int64_t dx_stride);

}  // namespace mambascope::kernels
