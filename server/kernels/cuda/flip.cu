#include "server/kernels/cuda/flip.h"

#include "server/kernels/cuda/device.h"

namespace mambascope::kernels::cuda {
namespace {

constexpr int kThreads = 256;  // of a row

// The row that stands in `row`'s place when its sequence is read from its end.
__device__ int64_t Mirrored(int64_t row, const int32_t* seq_start, const int32_t* sequence_of) {
  const int32_t s = sequence_of[row];
  return int64_t{seq_start[s]} + seq_start[s + 1] - 1 - row;
}

__global__ void __launch_bounds__(kThreads)
    FlipKernel(const float* __restrict__ in, int64_t cols, const int32_t* __restrict__ seq_start,
               const int32_t* __restrict__ sequence_of, float* __restrict__ out) {
  const int64_t row = blockIdx.x;
  const float* from = in + Mirrored(row, seq_start, sequence_of) * cols;
  for (int64_t m = threadIdx.x; m < cols; m += kThreads) out[row * cols + m] = from[m];
}

__global__ void __launch_bounds__(kThreads)
    AddFlippedKernel(const float* __restrict__ backward, int64_t cols,
                     const int32_t* __restrict__ seq_start, const int32_t* __restrict__ sequence_of,
                     float scale, float* __restrict__ sum) {
  const int64_t row = blockIdx.x;
  const float* from = backward + Mirrored(row, seq_start, sequence_of) * cols;
  float* to = sum + row * cols;
  for (int64_t m = threadIdx.x; m < cols; m += kThreads) to[m] = scale * (to[m] + from[m]);
}

}  // namespace

absl::Status FlipRows(const float* in, int64_t rows, int64_t cols, const int32_t* seq_start,
                      const int32_t* sequence_of, float* out, cudaStream_t stream) {
  if (rows == 0) return absl::OkStatus();
  FlipKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(in, cols, seq_start, sequence_of,
                                                                   out);
  return LaunchStatus("flipping rows");
}

absl::Status AddFlipped(const float* backward, int64_t rows, int64_t cols, const int32_t* seq_start,
                        const int32_t* sequence_of, float scale, float* sum, cudaStream_t stream) {
  if (rows == 0) return absl::OkStatus();
  AddFlippedKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(backward, cols, seq_start,
                                                                         sequence_of, scale, sum);
  return LaunchStatus("adding flipped rows");
}

}  // namespace mambascope::kernels::cuda
