#include "server/kernels/cuda/image_tokens.h"

#include "server/kernels/cuda/device.h"

namespace mambascope::kernels::cuda {
namespace {

constexpr int kThreads = 256;  // of a token

__global__ void __launch_bounds__(kThreads) PlaceKernel(const ImageTokens in, float* h) {
  const int64_t row = blockIdx.x, image = row / in.tokens, i = row % in.tokens;
  const int64_t patch = image * (in.tokens - 1) + (i > in.class_position ? i - 1 : i);
  const float* from = i == in.class_position ? in.cls_token : in.patches + patch * in.cols;
  const float* position = in.pos_embed == nullptr ? nullptr : in.pos_embed + i * in.cols;
  for (int64_t m = threadIdx.x; m < in.cols; m += kThreads) {
    h[row * in.cols + m] = position == nullptr ? from[m] : from[m] + position[m];
  }
}

}  // namespace

absl::Status PlaceImageTokens(const ImageTokens& in, float* h, cudaStream_t stream) {
  const int64_t rows = in.images * in.tokens;
  if (rows == 0) return absl::OkStatus();
  PlaceKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(in, h);
  return LaunchStatus("image tokens");
}

}  // namespace mambascope::kernels::cuda
