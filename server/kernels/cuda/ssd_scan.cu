#include "server/kernels/cuda/ssd_scan.h"

#include <algorithm>

#include "server/base/check.h"
#include "server/kernels/cuda/device.h"
#include "server/kernels/cuda/scan_launch.cuh"
#include "server/kernels/cuda/scan_tile.cuh"
#include "server/kernels/scan_body.h"

namespace mambascope::kernels::cuda {
namespace {

// The inputs of one stage. All kChannels channels of a block belong to one head.
template <int kPerLane>
struct Stage {
  using Channels = float[kStage<kPerLane>][kChannels];
  Channels x, z;
  float dt[kStage<kPerLane>];
  StageBC<kPerLane> bc;
};
template <int kPerLane>
struct Shared {
  Stage<kPerLane> stages[2];       // one is computed while the other arrives
  float2 steps[kStage<kPerLane>];  // delta, decay
  float y[kStage<kPerLane>][kChannels];
};

// Blocks of x: kChannels channels of a head; of y: a sequence. The names of a channel: `p` within
// its head, `d` among all.
template <int kPerLane>
__global__ void __launch_bounds__(kThreads) ScanKernel(const SsdInputs in, const SsdOutputs out) {
  extern __shared__ float4 shared_memory[];
  auto& shared = *reinterpret_cast<Shared<kPerLane>*>(shared_memory);
  constexpr int kTokens = kStage<kPerLane>;
  const int P = static_cast<int>(in.head_dim), N = static_cast<int>(in.d_state);
  const int blocks_of_head = (P + kChannels - 1) / kChannels;
  const int head = blockIdx.x / blocks_of_head;
  const int first_p = blockIdx.x % blocks_of_head * kChannels;
  const int group = head / static_cast<int>(in.heads / in.groups);
  const int begin = in.seq_start[blockIdx.y], end = in.seq_start[blockIdx.y + 1];
  float* head_state = out.ssm_state[blockIdx.y] + int64_t{head} * N * P;

  const int lane = threadIdx.x % kLanes, channel = threadIdx.x / kLanes;
  const int p = first_p + channel;
  float state[kPerLane];
#pragma unroll
  for (int s = 0; s < kPerLane; ++s) {
    const int n = body::StateOf(lane, s, kPerLane, kLanes);
    state[s] = p < P && n < N ? head_state[int64_t{n} * P + p] : 0.0f;
  }
  const int own_channel = threadIdx.x % kChannels, own_token = threadIdx.x / kChannels;
  const bool own = first_p + own_channel < P;
  const int64_t own_d = int64_t{head} * P + first_p + own_channel;
  const float skip = in.D[head], bias = in.dt_bias[head], A = in.A[head] * body::kLog2E;

  const auto copy_ahead = [&](Stage<kPerLane>& stage, int first) {
    const int count = min(kTokens, end - first);
    for (int t = own_token; own && t < count; t += kLanes) {
      const int64_t token = first + t;
      CopyAhead(&stage.x[t][own_channel], in.x + token * in.xbc_stride + own_d);
      CopyAhead(&stage.z[t][own_channel], in.z + token * in.z_stride + own_d);
    }
    for (int t = threadIdx.x; t < count; t += kThreads) {
      CopyAhead(&stage.dt[t], in.dt + int64_t{first + t} * in.dt_stride + head);
    }
    CopyAheadBC(stage.bc, in.B + int64_t{group} * N, in.C + int64_t{group} * N, in.xbc_stride, N,
                count, [&](int t) { return int64_t{first} + t; });
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
    for (int t = threadIdx.x; t < count; t += kThreads) {
      const float delta = body::ClampedDelta(stage.dt[t], bias, in.delta_min, in.delta_max);
      shared.steps[t] = {delta, body::DecayPower(delta * A)};
    }
    __syncthreads();
    for (int base = 0; base < count; base += kTile) {
      float parts[kTile];
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        parts[t] = 0;
        if (base + t < count) {
          const float2 step = shared.steps[base + t];
          const float drive = step.x * stage.x[base + t][channel];
          float B[kPerLane], C[kPerLane];
          LoadStates(stage.bc.B[base + t], lane, B);
          LoadStates(stage.bc.C[base + t], lane, C);
#pragma unroll
          for (int s = 0; s < kPerLane; ++s) {
            state[s] = body::Advance({step.y, drive * B[s]}, state[s]);
            parts[t] = fmaf(C[s], state[s], parts[t]);
          }
        }
      }
      shared.y[base + lane][channel] = SumOfToken(parts, lane);
    }
    __syncthreads();
    for (int t = own_token; own && t < count; t += kLanes) {
      const int64_t at = int64_t{first + t} * in.heads * P + own_d;
      const float y = shared.y[t][own_channel];
      if (out.y != nullptr) out.y[at] = y;
      out.gated[at] = body::Gate(y, skip, stage.x[t][own_channel], stage.z[t][own_channel]);
    }
  }
#pragma unroll
  for (int s = 0; s < kPerLane; ++s) {
    const int n = body::StateOf(lane, s, kPerLane, kLanes);
    if (p < P && n < N) head_state[int64_t{n} * P + p] = state[s];
  }
}

__global__ void DeltaKernel(const float* dt, int64_t dt_stride, const float* dt_bias,
                            float delta_min, float delta_max, int64_t count, int64_t heads,
                            float* delta) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t token = i / heads, head = i % heads;
  delta[i] = body::ClampedDelta(dt[token * dt_stride + head], dt_bias[head], delta_min, delta_max);
}

}  // namespace

absl::Status SsdScan(const SsdInputs& in, const SsdOutputs& out, cudaStream_t stream) {
  const int64_t channels = in.heads * in.head_dim;
  MS_CHECK(in.groups >= 1 && in.heads % in.groups == 0 && in.head_dim >= 1);
  MS_CHECK(in.d_state >= 1 && in.d_state <= body::kMaxStates);
  MS_CHECK(in.z_stride >= channels && in.dt_stride >= in.heads);
  MS_CHECK(in.xbc_stride >= std::max(channels, in.groups * in.d_state));
  if (in.sequences == 0) return absl::OkStatus();
  const int64_t blocks = in.heads * ((in.head_dim + kChannels - 1) / kChannels);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(in.sequences));
  return WithStatesPerLane(in.d_state, [&](auto per_lane) {
    constexpr int kPerLane = decltype(per_lane)::value;
    return LaunchScan(ScanKernel<kPerLane>, grid, sizeof(Shared<kPerLane>), stream, "SSD scan", in,
                      out);
  });
}

absl::Status SsdDelta(const float* dt, int64_t dt_stride, const float* dt_bias, float delta_min,
                      float delta_max, int64_t tokens, int64_t heads, float* delta,
                      cudaStream_t stream) {
  MS_CHECK(dt_stride >= heads);
  constexpr int64_t kWidth = 256;
  const int64_t count = tokens * heads;
  if (count == 0) return absl::OkStatus();
  DeltaKernel<<<static_cast<unsigned>((count + kWidth - 1) / kWidth), kWidth, 0, stream>>>(
      dt, dt_stride, dt_bias, delta_min, delta_max, count, heads, delta);
  return LaunchStatus("SSD delta");
}

}  // namespace mambascope::kernels::cuda
