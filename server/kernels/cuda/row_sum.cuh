#pragma once

#include <cstdint>

#include "server/kernels/sum_body.h"

// A row is summed by kLanes threads of a block in the order of sum_body.h.
namespace mambascope::kernels::cuda {

constexpr int kRowThreads = 256;

// The tree over kLanes (32 or kRowThreads) neighbouring threads; every one of them gets the sum.
// `shared` is used by kRowThreads lanes only, which must all be here.
template <int kLanes>
__device__ float RowSum(float sum, float (&shared)[kRowThreads]) {
  static_assert(kLanes == 32 || kLanes == kRowThreads);
  if constexpr (kLanes == kRowThreads) {
    shared[threadIdx.x] = sum;
    __syncthreads();
    float values[kRowThreads / 32];
#pragma unroll
    for (int w = 0; w < kRowThreads / 32; ++w) values[w] = shared[w * 32 + threadIdx.x % 32];
    sum = body::TreeSum(values, kRowThreads / 32);  // the steps of 128, 64 and 32
  }
#pragma unroll
  for (int half = 16; half >= 1; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  return sum;
}

// Numbers [at, at + 4) of a row, zeros from `cols` on. `aligned`: the row starts on 16 bytes and
// holds whole packets.
__device__ inline float4 LoadPacket(const float* row, int64_t at, int64_t cols, bool aligned) {
  if (aligned) return *reinterpret_cast<const float4*>(row + at);
  return {row[at], at + 1 < cols ? row[at + 1] : 0.0f, at + 2 < cols ? row[at + 2] : 0.0f,
          at + 3 < cols ? row[at + 3] : 0.0f};
}

__device__ inline void StorePacket(float4 v, float* row, int64_t at, int64_t cols, bool aligned) {
  if (aligned) {
    *reinterpret_cast<float4*>(row + at) = v;
    return;
  }
  row[at] = v.x;
  if (at + 1 < cols) row[at + 1] = v.y;
  if (at + 2 < cols) row[at + 2] = v.z;
  if (at + 3 < cols) row[at + 3] = v.w;
}

}  // namespace mambascope::kernels::cuda
