#pragma once

#include <cstdint>
#include <span>

#include "server/kernels/activation.h"

namespace mambascope::kernels {

// What one output token of a mixer reads of each input token between convolution and out_proj
// (methods.md, section 5; LaTIM, arXiv 2502.15612, section 3), for channel d and input token j:
//   out[j, d] = sum_{m < taps, j + m <= target} row[j + m, d] f(weight[m, d] x_in[j, d])
// where row[k, d] is what the output reads of the convolution's output at k. With f the identity
// and the activation's frozen slope in `row` the parts add up to the whole exactly; another f is
// LaTIM's additive approximation f(sum) = sum f.
//
// All functions run on the calling thread, for use inside a pool's tasks; the bits of an element
// depend on that element's inputs alone.

// A row of the hidden attention becomes what out_proj's input reads of each convolution output:
//   row[k, d] = (alpha[k, d / channels_per_map] + [k = target] skip[d / channels_per_map])
//               scale[d] slope[k, d]                                          k in [0, target]
//   sums[d]   = sum_k row[k, d]
struct RowFold {                 // borrowed until the call returns
  const float* alpha = nullptr;  // [target + 1, maps]
  int64_t maps = 0, channels_per_map = 1;
  int64_t target = 0;
  const float* skip = nullptr;   // [maps] D
  const float* scale = nullptr;  // [maps channels_per_map]
  const float* slope = nullptr;  // [target + 1, slope_stride], or null: 1
  int64_t slope_stride = 0;
  float* row = nullptr;    // [target + 1, row_stride]; may be alpha where channels_per_map is 1
  int64_t row_stride = 0;  // equal to maps then
  float* sums = nullptr;   // [maps channels_per_map]
};
// For the maps [begin, end).
void FoldRow(const RowFold& fold, int64_t begin, int64_t end);

struct TapRow {                // borrowed until the call returns
  const float* row = nullptr;  // [target + 1, channels]
  int64_t target = 0;
  const float* x_in = nullptr;  // [target + 1, x_stride]
  int64_t x_stride = 0;
  const float* weight = nullptr;  // [taps, channels]: weight[m] meets the input m tokens before
  int64_t channels = 0, taps = 0;
  Activation f = Activation::kIdentity;
};
// For the input tokens [begin, end), 0 <= begin, end <= target + 1. Row j goes to
// out + (j - begin) out_stride, which may run backwards; `accumulate` adds to what is there.
void TapRows(const TapRow& in, int64_t begin, int64_t end, bool accumulate, float* out,
             int64_t out_stride);

// c[i] <- f(c[i]) / c[i]: the slope by which the activation is read as a gate. SiLU: the sigmoid,
// ReLU: [c > 0], identity: 1.
void ActivationSlope(Activation f, std::span<float> c);

}  // namespace mambascope::kernels
