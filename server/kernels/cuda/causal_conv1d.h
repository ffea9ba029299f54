#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "server/kernels/activation.h"

namespace mambascope::kernels::cuda {

// causal_conv1d.h on the device: same formula, layout and promise (the bits of a token depend on
// its own sequence alone, and a cut anywhere gives the uncut result). All pointers, those inside
// `conv_state` too, are of the device and borrowed until the stream has run the call.
struct ConvInputs {
  const float* x_in = nullptr;  // [tokens, x_stride], the first `channels` of each row
  int64_t x_stride = 0;
  int64_t channels = 0, taps = 0;  // taps >= 1
  const float* weight = nullptr;   // [channels, taps] as in the checkpoint
  const float* bias = nullptr;     // [channels] or null
  Activation activation = Activation::kSilu;
  int64_t sequences = 0, tokens = 0;
  const int32_t* seq_start = nullptr;  // [sequences + 1] first token of each, then `tokens`
};
struct ConvOutputs {
  float* x = nullptr;                  // [tokens, channels]; must not overlap x_in
  float* const* conv_state = nullptr;  // [sequences] pointers to [taps - 1, channels], in and out
};
absl::Status CausalConv1d(const ConvInputs& in, const ConvOutputs& out, cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
