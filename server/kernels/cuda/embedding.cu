#include <algorithm>

#include "server/kernels/cuda/device.h"
#include "server/kernels/cuda/embedding.h"

namespace mambascope::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// Enough blocks for several on every multiprocessor there is; beyond that threads take more work.
constexpr int64_t kMostBlocks = 4096;

__device__ float Value(float v) { return v; }
__device__ float Value(Bf16 v) { return __uint_as_float(static_cast<uint32_t>(v) << 16); }

template <typename T>
__global__ void GatherRowsKernel(const T* __restrict__ embeddings,
                                 const int32_t* __restrict__ tokens, int64_t cols,
                                 float* __restrict__ h) {
  const T* from = embeddings + tokens[blockIdx.x] * cols;
  float* to = h + blockIdx.x * cols;
  for (int64_t m = threadIdx.x; m < cols; m += kThreads) to[m] = Value(from[m]);
}

__global__ void WidenKernel(const Bf16* __restrict__ narrow, int64_t count,
                            float* __restrict__ wide) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    wide[i] = Value(narrow[i]);
  }
}

template <typename T>
absl::Status Gather(const T* embeddings, const int32_t* tokens, int64_t rows, int64_t cols,
                    float* h, cudaStream_t stream) {
  if (rows == 0) return absl::OkStatus();
  GatherRowsKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(embeddings, tokens, cols,
                                                                         h);
  return LaunchStatus("embedding gather");
}

}  // namespace

absl::Status GatherRows(const float* embeddings, const int32_t* tokens, int64_t rows, int64_t cols,
                        float* h, cudaStream_t stream) {
  return Gather(embeddings, tokens, rows, cols, h, stream);
}

absl::Status GatherRows(const Bf16* embeddings, const int32_t* tokens, int64_t rows, int64_t cols,
                        float* h, cudaStream_t stream) {
  return Gather(embeddings, tokens, rows, cols, h, stream);
}

absl::Status Widen(const Bf16* narrow, int64_t count, float* wide, cudaStream_t stream) {
  if (count == 0) return absl::OkStatus();
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMostBlocks);
  WidenKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(narrow, count, wide);
  return LaunchStatus("widening bf16");
}

}  // namespace mambascope::kernels::cuda
