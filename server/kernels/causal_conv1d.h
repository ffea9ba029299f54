#pragma once

#include <cstdint>
#include <span>

#include "server/base/thread_pool.h"
#include "server/kernels/activation.h"

namespace mambascope::kernels {

// Depthwise causal convolution and its activation, for token i and channel d:
//   c[i, d] = bias[d] + sum_{k < taps} weight[d, taps - 1 - k] x_in[i - k, d]     x[i, d] = f(c[i,
//   d])
// The last tap is the current token; tokens before a sequence's first come from its conv_state.
// Layout: row-major, sequences packed end to end without padding (padding leaks into the state).
// The bits of a token depend on its own sequence alone, and a cut anywhere gives the uncut result.
struct ConvInputs {             // borrowed until the call returns
  const float* x_in = nullptr;  // [tokens, x_stride], the first `channels` of each row
  int64_t x_stride = 0;
  int64_t channels = 0, taps = 0;  // taps >= 1
  const float* weight = nullptr;   // [channels, taps] as in the checkpoint
  const float* bias = nullptr;     // [channels] or null
  Activation activation = Activation::kSilu;
  std::span<const int32_t> seq_start;  // [sequences + 1] first token of each, then `tokens`
};
struct ConvOutputs {
  float* x = nullptr;  // [tokens, channels]; must not overlap x_in
  // [sequences] pointers to [taps - 1, channels]: in: the last taps - 1 convolution inputs before
  // the sequence's first token here (zeros at position 0), oldest first; out: after its last token.
  std::span<float* const> conv_state;
};
void CausalConv1d(ThreadPool& pool, const ConvInputs& in, const ConvOutputs& out);

}  // namespace mambascope::kernels
