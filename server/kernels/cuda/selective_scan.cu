#include "server/kernels/cuda/selective_scan.h"

#include <algorithm>

#include "server/base/check.h"
#include "server/kernels/cuda/device.h"
#include "server/kernels/cuda/scan_launch.cuh"
#include "server/kernels/cuda/scan_tile.cuh"
#include "server/kernels/scan_body.h"

namespace mambascope::kernels::cuda {
namespace {

// The inputs of one stage, [token][channel] each.
template <int kPerLane>
struct Stage {
  using Channels = float[kStage<kPerLane>][kChannels];
  Channels x, dt, z;
  StageBC<kPerLane> bc;
};
template <int kPerLane>
struct Shared {
  Stage<kPerLane> stages[2];                  // one is computed while the other arrives
  float2 steps[kStage<kPerLane>][kChannels];  // delta, x
  float y[kStage<kPerLane>][kChannels];
};

template <int kPerLane>
__global__ void __launch_bounds__(kThreads) ScanKernel(const ScanInputs in, const ScanOutputs out) {
  extern __shared__ float4 shared_memory[];
  auto& shared = *reinterpret_cast<Shared<kPerLane>*>(shared_memory);
  constexpr int kTokens = kStage<kPerLane>;
  const int D = static_cast<int>(in.d_inner), N = static_cast<int>(in.d_state);
  const int begin = in.seq_start[blockIdx.y], end = in.seq_start[blockIdx.y + 1];
  float* ssm_state = out.ssm_state[blockIdx.y];

  // The recurrence's place: one channel, some of its states.
  const int lane = threadIdx.x % kLanes, channel = threadIdx.x / kLanes;
  const int d = blockIdx.x * kChannels + channel;
  float A[kPerLane], state[kPerLane];
#pragma unroll
  for (int s = 0; s < kPerLane; ++s) {
    const int n = body::StateOf(lane, s, kPerLane, kLanes);
    const bool used = d < D && n < N;
    A[s] = used ? in.A[int64_t{n} * D + d] * body::kLog2E : 0.0f;
    state[s] = used ? ssm_state[int64_t{n} * D + d] : 0.0f;
  }
  // The place for what is elementwise: one channel, every kLanes-th token.
  const int own_channel = threadIdx.x % kChannels, own_token = threadIdx.x / kChannels;
  const int own_d = blockIdx.x * kChannels + own_channel;
  const bool own = own_d < D;
  const float skip = own ? in.D[own_d] : 0.0f;
  const float bias = own && in.dt_bias != nullptr ? in.dt_bias[own_d] : 0.0f;

  const auto copy_ahead = [&](Stage<kPerLane>& stage, int first) {
    const int count = min(kTokens, end - first);
    for (int t = own_token; own && t < count; t += kLanes) {
      const int64_t token = first + t;
      CopyAhead(&stage.x[t][own_channel], in.x + token * D + own_d);
      CopyAhead(&stage.dt[t][own_channel], in.dt + token * D + own_d);
      CopyAhead(&stage.z[t][own_channel], in.z + token * in.z_stride + own_d);
    }
    CopyAheadBC(stage.bc, in.B, in.C, in.bc_stride, N, count,
                [&](int t) { return int64_t{first} + t; });
  };

  ZeroPadding(shared.stages[0].bc, N);
  ZeroPadding(shared.stages[1].bc, N);
  if (begin < end) copy_ahead(shared.stages[0], begin);
  __pipeline_commit();
  int buffer = 0;
  for (int first = begin; first < end; first += kTokens, buffer ^= 1) {
    Stage<kPerLane>& stage = shared.stages[buffer];
    const int count = min(kTokens, end - first);
    if (first + kTokens < end) copy_ahead(shared.stages[buffer ^ 1], first + kTokens);
    __pipeline_commit();
    __pipeline_wait_prior(1);  // this stage is here, the next may be on its way
    for (int t = own_token; own && t < count; t += kLanes) {
      const float delta = body::Softplus(stage.dt[t][own_channel] + bias);
      shared.steps[t][own_channel] = {delta, stage.x[t][own_channel]};
      if (out.delta != nullptr) out.delta[int64_t{first + t} * D + own_d] = delta;
    }
    __syncthreads();
    for (int base = 0; base < count; base += kTile) {
      float parts[kTile];
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        parts[t] = 0;
        if (base + t < count) {
          const float2 step = shared.steps[base + t][channel];
          float B[kPerLane], C[kPerLane];
          LoadStates(stage.bc.B[base + t], lane, B);
          LoadStates(stage.bc.C[base + t], lane, C);
#pragma unroll
          for (int s = 0; s < kPerLane; ++s) {
            state[s] = body::Advance(body::Discretize(step.x, A[s], B[s], step.y), state[s]);
            parts[t] = fmaf(C[s], state[s], parts[t]);
          }
        }
      }
      shared.y[base + lane][channel] = SumOfToken(parts, lane);
    }
    __syncthreads();
    for (int t = own_token; own && t < count; t += kLanes) {
      const int64_t at = int64_t{first + t} * D + own_d;
      const float y = shared.y[t][own_channel];
      if (out.y != nullptr) out.y[at] = y;
      out.gated[at] = body::Gate(y, skip, stage.x[t][own_channel], stage.z[t][own_channel]);
    }
  }
#pragma unroll
  for (int s = 0; s < kPerLane; ++s) {
    const int n = body::StateOf(lane, s, kPerLane, kLanes);
    if (d < D && n < N) ssm_state[int64_t{n} * D + d] = state[s];
  }
}

__global__ void SoftplusKernel(const float* dt, const float* dt_bias, int64_t count, int64_t D,
                               float* delta) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    delta[i] = body::Softplus(dt[i] + (dt_bias == nullptr ? 0.0f : dt_bias[i % D]));
  }
}

}  // namespace

absl::Status SelectiveScan(const ScanInputs& in, const ScanOutputs& out, cudaStream_t stream) {
  MS_CHECK(in.d_state >= 1 && in.d_state <= body::kMaxStates);
  MS_CHECK(in.bc_stride >= in.d_state && in.z_stride >= in.d_inner);
  if (in.sequences == 0) return absl::OkStatus();
  const dim3 grid(static_cast<unsigned>((in.d_inner + kChannels - 1) / kChannels),
                  static_cast<unsigned>(in.sequences));
  return WithStatesPerLane(in.d_state, [&](auto per_lane) {
    constexpr int kPerLane = decltype(per_lane)::value;
    return LaunchScan(ScanKernel<kPerLane>, grid, sizeof(Shared<kPerLane>), stream,
                      "selective scan", in, out);
  });
}

absl::Status Softplus(const float* dt, const float* dt_bias, int64_t tokens, int64_t d_inner,
                      float* delta, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 4096, kWidth = 256;
  const int64_t count = tokens * d_inner;
  if (count == 0) return absl::OkStatus();
  const int64_t blocks = std::min((count + kWidth - 1) / kWidth, kMostBlocks);
  SoftplusKernel<<<static_cast<unsigned>(blocks), kWidth, 0, stream>>>(dt, dt_bias, count, d_inner,
                                                                       delta);
  return LaunchStatus("softplus");
}

}  // namespace mambascope::kernels::cuda
