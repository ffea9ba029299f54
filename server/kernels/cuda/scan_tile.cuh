#pragma once

#include <cuda_pipeline.h>

#include <cstdint>

#include "server/kernels/sum_body.h"

// What the scans share. A block of kThreads takes kChannels neighbouring channels of one sequence
// and walks its tokens in order; the states of a channel are dealt to kLanes neighbouring threads.
//
// The recurrence is one fused multiply-add a token and state, a few cycles, so keeping the order of
// the tokens costs no time as long as everything else is off that chain: inputs arrive a stage
// ahead by asynchronous copies, and the sums over states of kTile tokens are taken together. In
// return a result does not depend on where a sequence was cut, nor on its neighbours.
namespace mambascope::kernels::cuda {

using body::kLanes;

constexpr int kChannels = 8;  // 32 bytes of a row: one sector of memory
constexpr int kThreads = kChannels * kLanes;
constexpr int kTile = kLanes;  // one token's sum a lane

// Tokens that are copied ahead while the stage before is computed: enough work to cover a trip to
// memory (a token is about 12 instructions a warp for one state a lane), and shared memory for
// several blocks a multiprocessor.
template <int kPerLane>
constexpr int kStage = kPerLane == 1   ? 64
                       : kPerLane <= 4 ? 32
                                       : 16;

// B and C of a stage; columns from d_state on are zero.
template <int kPerLane>
struct StageBC {
  static constexpr int kStates = kPerLane * kLanes;
  float B[kStage<kPerLane>][kStates], C[kStage<kPerLane>][kStates];
};

// Four bytes into shared memory, on their way until __pipeline_wait_prior.
__device__ inline void CopyAhead(float* shared, const float* global) {
  __pipeline_memcpy_async(shared, global, sizeof(float));
}

// Starts copying rows of B and C; row(t) is the t-th token of the stage. Columns from d_state on
// must have been zeroed once.
template <int kPerLane, typename Row>
__device__ void CopyAheadBC(StageBC<kPerLane>& stage, const float* B, const float* C,
                            int64_t stride, int d_state, int count, const Row& row) {
  constexpr int kStates = StageBC<kPerLane>::kStates;
  for (int e = threadIdx.x; e < count * kStates; e += kThreads) {
    const int t = e / kStates, n = e % kStates;
    if (n >= d_state) continue;
    const int64_t at = row(t) * stride + n;
    CopyAhead(&stage.B[t][n], B + at);
    CopyAhead(&stage.C[t][n], C + at);
  }
}

template <int kPerLane>
__device__ void ZeroPadding(StageBC<kPerLane>& stage, int d_state) {
  constexpr int kStates = StageBC<kPerLane>::kStates;
  for (int e = threadIdx.x; e < kStage<kPerLane> * kStates; e += kThreads) {
    if (e % kStates < d_state) continue;
    stage.B[e / kStates][e % kStates] = 0;
    stage.C[e / kStates][e % kStates] = 0;
  }
}

// This lane's states of a row of B or C, in the order of body::StateOf.
template <int kPerLane>
__device__ void LoadStates(const float* row, int lane, float (&states)[kPerLane]) {
  if constexpr (kPerLane == 1) {
    states[0] = row[lane];
  } else if constexpr (kPerLane == 2) {
    const float2 v = reinterpret_cast<const float2*>(row)[lane];
    states[0] = v.x;
    states[1] = v.y;
  } else {
#pragma unroll
    for (int q = 0; q < kPerLane / 4; ++q) {
      const float4 v = reinterpret_cast<const float4*>(row)[q * kLanes + lane];
      states[4 * q] = v.x;
      states[4 * q + 1] = v.y;
      states[4 * q + 2] = v.z;
      states[4 * q + 3] = v.w;
    }
  }
}

// values[t] is this lane's part of token t's sum; afterwards values[0] is the sum over kLanes lanes
// for the token of this lane's number, in body::TreeSum's order. Each step halves the tokens that a
// lane still has: 15 exchanges in place of 64. (A recursion, so that every index is a constant and
// the array stays in registers.)
template <int kHalf>
__device__ inline void SumOfTokens(float (&values)[kTile], int lane) {
  const bool upper = (lane & kHalf) != 0;
#pragma unroll
  for (int t = 0; t < kHalf; ++t) {
    const float keep = upper ? values[t + kHalf] : values[t];
    const float give = upper ? values[t] : values[t + kHalf];
    values[t] = keep + __shfl_xor_sync(~0u, give, kHalf);
  }
  if constexpr (kHalf > 1) SumOfTokens<kHalf / 2>(values, lane);
}
__device__ inline float SumOfToken(float (&values)[kTile], int lane) {
  SumOfTokens<kTile / 2>(values, lane);
  return values[0];
}

}  // namespace mambascope::kernels::cuda
