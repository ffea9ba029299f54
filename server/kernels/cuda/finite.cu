#include "server/kernels/cuda/finite.h"

#include "server/kernels/cuda/device.h"

namespace mambascope::kernels::cuda {
namespace {

constexpr int kThreads = 128;               // of a row
constexpr uint32_t kExponent = 0x7f800000;  // all ones: NaN or infinity

__global__ void __launch_bounds__(kThreads)
    FlagKernel(const float* __restrict__ values, int64_t cols, const int32_t* __restrict__ owner,
               int32_t* __restrict__ flags) {
  const float* row = values + int64_t{blockIdx.x} * cols;
  bool fault = false;
  for (int64_t m = threadIdx.x; m < cols; m += kThreads) {
    fault |= (__float_as_uint(row[m]) & kExponent) == kExponent;
  }
  if (__syncthreads_or(fault) != 0 && threadIdx.x == 0) flags[owner[blockIdx.x]] = 1;
}

}  // namespace

absl::Status FlagNonFinite(const float* values, int64_t rows, int64_t cols, const int32_t* owner,
                           int32_t* flags, cudaStream_t stream) {
  if (rows == 0) return absl::OkStatus();
  FlagKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(values, cols, owner, flags);
  return LaunchStatus("non-finite check");
}

}  // namespace mambascope::kernels::cuda
