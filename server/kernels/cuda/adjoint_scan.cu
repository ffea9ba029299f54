// The functions of hidden_attention.h that are linear in the number of tokens: rows of alpha, and
// products of the mean map with a vector, without any map.
#include "server/base/check.h"
#include "server/kernels/cuda/device.h"
#include "server/kernels/cuda/hidden_attention.h"
#include "server/kernels/cuda/row_sum.cuh"
#include "server/kernels/cuda/scan_launch.cuh"
#include "server/kernels/cuda/scan_tile.cuh"
#include "server/kernels/scan_body.h"

namespace mambascope::kernels::cuda {
namespace {

struct Scan {
  const float *delta, *A, *B, *C;
  int64_t bc_stride;
  int D, N, tokens;  // the first `tokens` of the sequence take part
  const float* v;    // what enters at each token, or null for nothing
  int64_t v_stride;
  bool per_channel;      // v[token, d], else v[token, 0]
  const float* start_C;  // [N] the adjoint state before the last token, or null for zeros
  float* rows;           // [tokens, D]
};

template <int kPerLane>
struct Stage {
  using Channels = float[kStage<kPerLane>][kChannels];
  Channels delta, v;
  StageBC<kPerLane> bc;
};
template <int kPerLane>
struct Shared {
  Stage<kPerLane> stages[2];  // one is computed while the other arrives
  float sums[kStage<kPerLane>][kChannels];
};

// kReverse: from the last token to the first, the adjoint; otherwise the scan itself.
template <int kPerLane, bool kReverse>
__global__ void __launch_bounds__(kThreads) RowsKernel(const Scan in) {
  extern __shared__ float4 shared_memory[];
  auto& shared = *reinterpret_cast<Shared<kPerLane>*>(shared_memory);
  constexpr int kTokens = kStage<kPerLane>;
  const auto token_of = [&](int step) -> int64_t { return kReverse ? in.tokens - 1 - step : step; };
  const int lane = threadIdx.x % kLanes, channel = threadIdx.x / kLanes;
  const int d = blockIdx.x * kChannels + channel;
  float A[kPerLane], state[kPerLane];
#pragma unroll
  for (int s = 0; s < kPerLane; ++s) {
    const int n = body::StateOf(lane, s, kPerLane, kLanes);
    A[s] = d < in.D && n < in.N ? in.A[int64_t{n} * in.D + d] * body::kLog2E : 0.0f;
    state[s] = in.start_C != nullptr && n < in.N ? in.start_C[n] : 0.0f;
  }
  const int own_channel = threadIdx.x % kChannels, own_token = threadIdx.x / kChannels;
  const int own_d = blockIdx.x * kChannels + own_channel;
  const bool own = own_d < in.D;

  const auto copy_ahead = [&](Stage<kPerLane>& stage, int first) {
    const int count = min(kTokens, in.tokens - first);
    for (int t = own_token; own && t < count; t += kLanes) {
      const int64_t token = token_of(first + t);
      CopyAhead(&stage.delta[t][own_channel], in.delta + token * in.D + own_d);
      if (in.v == nullptr) {
        stage.v[t][own_channel] = 0;
      } else {
        CopyAhead(&stage.v[t][own_channel],
                  in.v + token * in.v_stride + (in.per_channel ? own_d : 0));
      }
    }
    CopyAheadBC(stage.bc, in.B, in.C, in.bc_stride, in.N, count,
                [&](int t) { return token_of(first + t); });
  };

  ZeroPadding(shared.stages[0].bc, in.N);
  ZeroPadding(shared.stages[1].bc, in.N);
  if (in.tokens > 0) copy_ahead(shared.stages[0], 0);
  __pipeline_commit();
  int buffer = 0;
  for (int first = 0; first < in.tokens; first += kTokens, buffer ^= 1) {
    Stage<kPerLane>& stage = shared.stages[buffer];
    const int count = min(kTokens, in.tokens - first);
    if (first + kTokens < in.tokens) copy_ahead(shared.stages[buffer ^ 1], first + kTokens);
    __pipeline_commit();
    __pipeline_wait_prior(1);  // this stage is here, the next may be on its way
    __syncthreads();
    for (int base = 0; base < count; base += kTile) {
      float parts[kTile];
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        parts[t] = 0;
        if (base + t < count) {
          const float delta = stage.delta[base + t][channel], v = stage.v[base + t][channel];
          float B[kPerLane], C[kPerLane];
          LoadStates(stage.bc.B[base + t], lane, B);
          LoadStates(stage.bc.C[base + t], lane, C);
#pragma unroll
          for (int s = 0; s < kPerLane; ++s) {
            if constexpr (kReverse) {
              const float g = body::EnterAdjoint(v, C[s], state[s]);
              state[s] = g * body::DecayPower(delta * A[s]);
              parts[t] = fmaf(B[s], g, parts[t]);
            } else {
              state[s] = body::Advance(body::Discretize(delta, A[s], B[s], v), state[s]);
              parts[t] = fmaf(C[s], state[s], parts[t]);
            }
          }
        }
      }
      shared.sums[base + lane][channel] = SumOfToken(parts, lane);
    }
    __syncthreads();
    for (int t = own_token; own && t < count; t += kLanes) {
      const float sum = shared.sums[t][own_channel];
      in.rows[token_of(first + t) * in.D + own_d] =
          kReverse ? stage.delta[t][own_channel] * sum : sum;
    }
  }
}

template <int kRowLanes>
__global__ void __launch_bounds__(kRowThreads)
    MeansKernel(const float* __restrict__ rows, int64_t count, int64_t cols,
                float* __restrict__ out) {
  __shared__ float shared[kRowThreads];
  const int64_t row = int64_t{blockIdx.x} * (kRowThreads / kRowLanes) + threadIdx.x / kRowLanes;
  if (row >= count) return;  // whole warps, or the whole block, leave together
  const int lane = threadIdx.x % kRowLanes;
  const float* from = rows + row * cols;
  const bool aligned = cols % body::kPacket == 0;
  float sum = 0;
  for (int64_t at = lane * body::kPacket; at < cols; at += kRowLanes * body::kPacket) {
    const float4 v = LoadPacket(from, at, cols, aligned);
    sum += v.x;
    sum += v.y;
    sum += v.z;
    sum += v.w;
  }
  sum = RowSum<kRowLanes>(sum, shared);
  if (lane == 0) out[row] = sum / static_cast<float>(cols);
}

Scan Of(const ScanParameters& scan, float* rows) {
  MS_CHECK(scan.d_state >= 1 && scan.d_state <= body::kMaxStates);
  Scan in = {};
  in.delta = scan.delta;
  in.A = scan.A;
  in.B = scan.B;
  in.C = scan.C;
  in.bc_stride = scan.bc_stride;
  in.D = static_cast<int>(scan.d_inner);
  in.N = static_cast<int>(scan.d_state);
  in.tokens = static_cast<int>(scan.tokens);
  in.rows = rows;
  return in;
}

template <bool kReverse>
absl::Status Run(const Scan& in, cudaStream_t stream) {
  if (in.tokens == 0) return absl::OkStatus();
  return WithStatesPerLane(in.N, [&](auto per_lane) {
    constexpr int kPerLane = decltype(per_lane)::value;
    return LaunchScan(RowsKernel<kPerLane, kReverse>, dim3((in.D + kChannels - 1) / kChannels),
                      sizeof(Shared<kPerLane>), stream,
                      kReverse ? "adjoint scan" : "forward scan of a vector", in);
  });
}

// out[i] = mean of rows[i]; the rows start on 16 bytes.
absl::Status Means(const float* rows, int64_t count, int64_t cols, float* out,
                   cudaStream_t stream) {
  if (count == 0) return absl::OkStatus();
  if (body::RowLanes(cols) == 32) {
    constexpr int64_t kRows = kRowThreads / 32;
    MeansKernel<32><<<static_cast<unsigned>((count + kRows - 1) / kRows), kRowThreads, 0, stream>>>(
        rows, count, cols, out);
  } else {
    MeansKernel<kRowThreads>
        <<<static_cast<unsigned>(count), kRowThreads, 0, stream>>>(rows, count, cols, out);
  }
  return LaunchStatus("means of rows");
}

}  // namespace

absl::Status TargetRows(const ScanParameters& scan, int64_t target, bool without_target_decay,
                        float* rows, cudaStream_t stream) {
  MS_CHECK(0 <= target && target < scan.tokens);
  Scan in = Of(scan, rows);
  in.tokens = static_cast<int>(without_target_decay ? target : target + 1);
  in.start_C = scan.C + target * scan.bc_stride;
  const int64_t rest = (scan.tokens - in.tokens) * scan.d_inner;
  const cudaError_t zeroed =
      cudaMemsetAsync(rows + in.tokens * scan.d_inner, 0, rest * sizeof(float), stream);
  if (zeroed != cudaSuccess) return ToStatus(zeroed, "rows after the target");
  return Run</*kReverse=*/true>(in, stream);
}

absl::Status AdjointScan(const ScanParameters& scan, const float* v, int64_t v_stride,
                         bool per_channel, float* rows, cudaStream_t stream) {
  Scan in = Of(scan, rows);
  in.v = v;
  in.v_stride = v_stride;
  in.per_channel = per_channel;
  return Run</*kReverse=*/true>(in, stream);
}

absl::Status MeanAdjoint(const ScanParameters& scan, const float* v, float* scratch, float* out,
                         cudaStream_t stream) {
  absl::Status status = AdjointScan(scan, v, 1, false, scratch, stream);
  return status.ok() ? Means(scratch, scan.tokens, scan.d_inner, out, stream) : status;
}

absl::Status MeanForward(const ScanParameters& scan, const float* v, float* scratch, float* out,
                         cudaStream_t stream) {
  Scan in = Of(scan, scratch);
  in.v = v;
  in.v_stride = 1;
  absl::Status status = Run</*kReverse=*/false>(in, stream);
  return status.ok() ? Means(scratch, scan.tokens, scan.d_inner, out, stream) : status;
}

}  // namespace mambascope::kernels::cuda
