#include "server/kernels/cuda/mean_pooling.h"

#include "server/kernels/cuda/device.h"

namespace mambascope::kernels::cuda {
namespace {

constexpr int kThreads = 128;  // neighbouring columns

__global__ void __launch_bounds__(kThreads)
    PoolKernel(const float* __restrict__ rows, int64_t cols, const int32_t* __restrict__ seq_start,
               double* const* __restrict__ sums, const int64_t* __restrict__ counts,
               float* __restrict__ means) {
  const int64_t m = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (m >= cols) return;
  const int64_t s = blockIdx.y;
  double sum = sums[s][m];
  for (int64_t i = seq_start[s]; i < seq_start[s + 1]; ++i) sum += rows[i * cols + m];
  sums[s][m] = sum;
  means[s * cols + m] = static_cast<float>(sum / static_cast<double>(counts[s]));
}

}  // namespace

absl::Status PoolMeans(const float* rows, int64_t cols, int64_t sequences, const int32_t* seq_start,
                       double* const* sums, const int64_t* counts, float* means,
                       cudaStream_t stream) {
  if (sequences == 0) return absl::OkStatus();
  const dim3 grid(static_cast<unsigned>((cols + kThreads - 1) / kThreads),
                  static_cast<unsigned>(sequences));
  PoolKernel<<<grid, kThreads, 0, stream>>>(rows, cols, seq_start, sums, counts, means);
  return LaunchStatus("mean pooling");
}

}  // namespace mambascope::kernels::cuda
