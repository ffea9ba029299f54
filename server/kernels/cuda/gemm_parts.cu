#include "server/kernels/cuda/gemm_parts.h"

#include "server/kernels/cuda/device.h"
#include "server/kernels/host_device.h"
#include "server/kernels/split_body.h"

namespace mambascope::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Block x: columns; block y: rows, one after the other beyond the grid's limit.
template <typename Each>
__device__ void ForEach(int64_t rows, int64_t cols, const Each& each) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= cols) return;
  for (int64_t m = blockIdx.y; m < rows; m += gridDim.y) each(m, n);
}

__global__ void SplitKernel(const float* __restrict__ x, int64_t x_stride, int64_t rows,
                            int64_t cols, int64_t parts_stride, uint16_t* __restrict__ parts) {
  ForEach(rows, parts_stride, [&](int64_t m, int64_t k) {
    const body::Bf16Parts v = body::SplitInParts(k < cols ? x[m * x_stride + k] : 0.0f);
    uint16_t* to = parts + kParts * m * parts_stride + k;
    to[0] = v.high;
    to[parts_stride] = v.middle;
    to[2 * parts_stride] = v.low;
  });
}

__global__ void JoinKernel(const float* __restrict__ sums, const float* __restrict__ bias,
                           int64_t rows, int64_t cols, float* __restrict__ y, int64_t y_stride) {
  ForEach(rows, cols, [&](int64_t m, int64_t n) {
    const float* from = sums + kParts * m * cols + n;
    const float sum = (from[2 * cols] + from[cols]) + from[0];
    y[m * y_stride + n] = bias == nullptr ? sum : sum + bias[n];
  });
}

__global__ void BiasKernel(const float* __restrict__ bias, int64_t rows, int64_t cols,
                           float* __restrict__ y, int64_t y_stride) {
  ForEach(rows, cols, [&](int64_t m, int64_t n) { y[m * y_stride + n] += bias[n]; });
}

dim3 Grid(int64_t rows, int64_t cols) {
  constexpr int64_t kMostRows = 65535;
  return dim3(static_cast<unsigned>((cols + kThreads - 1) / kThreads),
              static_cast<unsigned>(rows < kMostRows ? rows : kMostRows));
}

}  // namespace

absl::Status SplitRows(const float* x, int64_t x_stride, int64_t rows, int64_t cols,
                       int64_t parts_stride, uint16_t* parts, cudaStream_t stream) {
  SplitKernel<<<Grid(rows, parts_stride), kThreads, 0, stream>>>(x, x_stride, rows, cols,
                                                                 parts_stride, parts);
  return LaunchStatus("splitting activations");
}

absl::Status JoinRows(const float* sums, const float* bias, int64_t rows, int64_t cols, float* y,
                      int64_t y_stride, cudaStream_t stream) {
  JoinKernel<<<Grid(rows, cols), kThreads, 0, stream>>>(sums, bias, rows, cols, y, y_stride);
  return LaunchStatus("joining products");
}

absl::Status AddBias(const float* bias, int64_t rows, int64_t cols, float* y, int64_t y_stride,
                     cudaStream_t stream) {
  BiasKernel<<<Grid(rows, cols), kThreads, 0, stream>>>(bias, rows, cols, y, y_stride);
  return LaunchStatus("bias");
}

}  // namespace mambascope::kernels::cuda
