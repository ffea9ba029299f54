#include "server/kernels/cuda/causal_conv1d.h"

#include "server/base/check.h"
#include "server/kernels/cuda/device.h"
#include "server/kernels/scan_body.h"

namespace mambascope::kernels::cuda {
namespace {

constexpr int kThreads = 128;  // neighbouring channels: 512 bytes of each row
// Tokens of one thread: its window of taps slides in registers, so 16 tokens read 19 inputs.
constexpr int kTile = 16;
constexpr int kWindowTaps = 4;  // every published model's; other counts take the general kernel

// The sequence that holds `token`: the last whose start is <= token (empty ones have none).
__device__ int64_t SequenceOf(const int32_t* seq_start, int64_t sequences, int64_t token) {
  int64_t low = 0, high = sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (seq_start[middle] <= token ? low : high) = middle;
  }
  return low;
}

// Input `i` of a sequence that starts at token `begin`; i >= -(taps - 1), where its state stands.
__device__ float Input(const ConvInputs& in, const float* state, int64_t begin, int64_t i,
                       int64_t d) {
  return i < 0 ? state[(in.taps - 1 + i) * in.channels + d]
               : in.x_in[(begin + i) * in.x_stride + d];
}

// One channel, up to kTile tokens, which may belong to several sequences. kTaps 0: any number.
template <int kTaps>
__global__ void __launch_bounds__(kThreads) ConvKernel(const ConvInputs in, const ConvOutputs out) {
  const int64_t d = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (d >= in.channels) return;
  const int64_t first = int64_t{blockIdx.y} * kTile, last = min(first + kTile, in.tokens);
  const float bias = in.bias == nullptr ? 0.0f : in.bias[d];
  constexpr int kKept = kTaps == 0 ? 1 : kTaps;
  float weight[kKept], window[kKept];
#pragma unroll
  for (int k = 0; k < kTaps; ++k) weight[k] = in.weight[d * kTaps + k];

  int64_t s = SequenceOf(in.seq_start, in.sequences, first);
  int64_t begin = in.seq_start[s], end = in.seq_start[s + 1];
  const float* state = out.conv_state[s];
  bool fill = true;  // the window is not this sequence's yet
  for (int64_t token = first; token < last; ++token) {
    while (token >= end) {
      ++s;
      begin = end;
      end = in.seq_start[s + 1];
      state = out.conv_state[s];
      fill = true;
    }
    const int64_t i = token - begin;
    float c = bias;
    if constexpr (kTaps == 0) {
      for (int64_t k = 0; k < in.taps; ++k) {
        c = body::Tap(in.weight[d * in.taps + k], Input(in, state, begin, i - (in.taps - 1) + k, d),
                      c);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kTaps - 1; ++k) {
        window[k] = fill ? Input(in, state, begin, i - (kTaps - 1) + k, d) : window[k + 1];
      }
      fill = false;
      window[kTaps - 1] = in.x_in[token * in.x_stride + d];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) c = body::Tap(weight[k], window[k], c);
    }
    out.x[token * in.channels + d] = body::Activate(in.activation, c);
  }
}

// The last taps - 1 inputs of each sequence. A launch of its own: other blocks of the convolution
// may still read the state of a sequence whose last token one of them has reached.
__global__ void __launch_bounds__(kThreads)
    StateKernel(const ConvInputs in, const ConvOutputs out) {
  const int64_t d = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (d >= in.channels) return;
  const int64_t begin = in.seq_start[blockIdx.y], tokens = in.seq_start[blockIdx.y + 1] - begin;
  float* state = out.conv_state[blockIdx.y];
  // Oldest first: a short sequence reads entry tokens + k when it writes entry k.
  for (int64_t k = 0; k < in.taps - 1; ++k) {
    state[k * in.channels + d] = Input(in, state, begin, tokens - (in.taps - 1) + k, d);
  }
}

}  // namespace

absl::Status CausalConv1d(const ConvInputs& in, const ConvOutputs& out, cudaStream_t stream) {
  MS_CHECK(in.taps >= 1 && in.x_stride >= in.channels);
  if (in.tokens == 0) return absl::OkStatus();
  const auto blocks = static_cast<unsigned>((in.channels + kThreads - 1) / kThreads);
  const dim3 grid(blocks, static_cast<unsigned>((in.tokens + kTile - 1) / kTile));
  if (in.taps == kWindowTaps) {
    ConvKernel<kWindowTaps><<<grid, kThreads, 0, stream>>>(in, out);
  } else {
    ConvKernel<0><<<grid, kThreads, 0, stream>>>(in, out);
  }
  if (absl::Status status = LaunchStatus("causal conv1d"); !status.ok()) return status;
  StateKernel<<<dim3(blocks, static_cast<unsigned>(in.sequences)), kThreads, 0, stream>>>(in, out);
  return LaunchStatus("causal conv1d's state");
}

}  // namespace mambascope::kernels::cuda
