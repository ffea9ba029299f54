// The mean hidden-attention map. Tokens are halved again and again: the block of the map between
// two neighbouring runs of `span` tokens (rows: the later, columns: the earlier) is left right^T,
// where both factors are decayed from the border between the two (methods.md, section 9, no. 1).
// Runs of kBase tokens are done by the recurrence.
//
//   levels of L = 8 kBase      span kBase: 1   2 kBase: 2   4 kBase: 3   the recurrence: .
//      .                       Every token is a row of one factor at each level, so one array
//      1 .                     [L, depth] holds both, and all blocks of a level are one batched
//      GEMM. 2 2 . 2 2 1 . 3 3 3 3 . ...
#include <algorithm>

#include "server/base/check.h"
#include "server/base/status.h"
#include "server/kernels/cuda/device.h"
#include "server/kernels/cuda/hidden_attention.h"
#include "server/kernels/scan_body.h"

namespace mambascope::kernels::cuda {
namespace {

// 136 sums, 16 decays and 16 steps fill a thread's registers; 32 tokens would not fit.
constexpr int kBase = 16;
constexpr int kPairs = kBase * (kBase + 1) / 2;
// Threads that share a base block's channels, and the parts that they are dealt to for want of
// blocks: 1024 tokens are 64 base blocks, an H200 has 132 multiprocessors.
constexpr int kBaseThreads = 128;
constexpr int kBaseParts = 4;
constexpr int kFactorThreads = 256;
// Factors of one block of channels stay in the second-level cache (50 MB on H100, 60 on H200)
// between the kernel that writes them and the GEMM.
constexpr int64_t kFactorBytes = 32 << 20;
constexpr int64_t kChannelMultiple = 8;

struct Map {
  const float *delta, *A, *B, *C;
  int64_t bc_stride;
  int D, N, tokens, padded;  // padded: tokens rounded up to whole base blocks
  float* blocks;             // [padded, padded] sums over channels of what GEMMs compute
  float* factors;            // [padded, depth]
  float* base;               // [kBaseParts, padded / kBase, kBase, kBase]
};

// The factors of channels [first, first + channels) at one level. One thread a pair of runs, state
// and channel: k = c * N + n.
__global__ void __launch_bounds__(kFactorThreads)
    FactorKernel(const Map map, int span, int first, int channels) {
  const int depth = channels * map.N;
  const int k = blockIdx.x * kFactorThreads + threadIdx.x;
  if (k >= depth) return;
  const int d = first + k / map.N, n = k % map.N;
  const float A = map.A[int64_t{n} * map.D + d] * body::kLog2E;
  const int border = (2 * static_cast<int>(blockIdx.y) + 1) * span;
  float* factor = map.factors + k;
  // From the border back: the step of j decays nothing that enters at j.
  float sum = 0;
  for (int j = min(border, map.padded) - 1; j >= border - span; --j) {
    float value = 0;
    if (j < map.tokens) {
      const float delta = map.delta[int64_t{j} * map.D + d];
      value = delta * map.B[j * map.bc_stride + n] * body::DecayPower(sum * A);
      sum += delta;
    }
    factor[int64_t{j} * depth] = value;
  }
  // From the border on: the step of i decays what is before it.
  sum = 0;
  for (int i = border; i < min(border + span, map.padded); ++i) {
    float value = 0;
    if (i < map.tokens) {
      sum += map.delta[int64_t{i} * map.D + d];
      value = map.C[i * map.bc_stride + n] * body::DecayPower(sum * A);
    }
    factor[int64_t{i} * depth] = value;
  }
}

// One base block, every kBaseParts * kBaseThreads-th channel a thread.
__global__ void __launch_bounds__(kBaseThreads) BaseKernel(const Map map) {
  extern __shared__ float shared[];  // B [kBase, N], C [kBase, N], then the warps' sums
  const int N = map.N, first = blockIdx.x * kBase;
  float *B = shared, *C = B + kBase * N, *warps = C + kBase * N;
  for (int e = threadIdx.x; e < kBase * N; e += kBaseThreads) {
    const int64_t token = first + e / N;
    const bool there = token < map.tokens;
    B[e] = there ? map.B[token * map.bc_stride + e % N] : 0.0f;
    C[e] = there ? map.C[token * map.bc_stride + e % N] : 0.0f;
  }
  __syncthreads();
  float sums[kPairs];
#pragma unroll
  for (int e = 0; e < kPairs; ++e) sums[e] = 0;
  for (int d = blockIdx.y * kBaseThreads + threadIdx.x; d < map.D; d += kBaseParts * kBaseThreads) {
    float delta[kBase];
#pragma unroll
    for (int i = 0; i < kBase; ++i) {
      delta[i] = first + i < map.tokens ? map.delta[int64_t{first + i} * map.D + d] : 0.0f;
    }
    for (int n = 0; n < N; ++n) {
      const float A = map.A[int64_t{n} * map.D + d] * body::kLog2E;
      float decay[kBase];
#pragma unroll
      for (int i = 0; i < kBase; ++i) decay[i] = body::DecayPower(delta[i] * A);
#pragma unroll
      for (int j = 0; j < kBase; ++j) {
        float h = delta[j] * B[j * N + n];
#pragma unroll
        for (int i = j; i < kBase; ++i) {
          if (i > j) h *= decay[i];
          sums[i * (i + 1) / 2 + j] = fmaf(C[i * N + n], h, sums[i * (i + 1) / 2 + j]);
        }
      }
    }
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int e = 0; e < kPairs; ++e) {
    float sum = sums[e];
#pragma unroll
    for (int half = 16; half >= 1; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
    if (lane == 0) warps[warp * kPairs + e] = sum;
  }
  __syncthreads();
  float* out = map.base + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kBase * kBase;
  for (int e = threadIdx.x; e < kBase * kBase; e += kBaseThreads) {
    const int i = e / kBase, j = e % kBase;
    if (j > i) continue;
    float sum = 0;
    for (int w = 0; w < kBaseThreads / 32; ++w) sum += warps[w * kPairs + i * (i + 1) / 2 + j];
    out[e] = sum;
  }
}

// The dense map: blocks and base blocks, divided by the number of channels.
__global__ void MapKernel(const Map map, float* __restrict__ out) {
  const int j = blockIdx.x * kFactorThreads + threadIdx.x;
  if (j >= map.tokens) return;
  const int64_t blocks = map.padded / kBase;
  for (int64_t i = blockIdx.y; i < map.tokens; i += gridDim.y) {
    float sum = 0;
    if (j <= i && i / kBase == j / kBase) {
      for (int part = 0; part < kBaseParts; ++part) {
        sum += map.base[((part * blocks + i / kBase) * kBase + i % kBase) * kBase + j % kBase];
      }
    } else if (j <= i) {
      sum = map.blocks[i * map.padded + j];
    }
    out[i * map.tokens + j] = sum / static_cast<float>(map.D);
  }
}

int64_t Padded(int64_t tokens) { return (tokens + kBase - 1) / kBase * kBase; }

// Channels whose factors are made at a time.
int64_t ChannelsOfBlock(const ScanParameters& scan) {
  const int64_t row = Padded(scan.tokens) * scan.d_state * static_cast<int64_t>(sizeof(float));
  const int64_t channels = kFactorBytes / row / kChannelMultiple * kChannelMultiple;
  return std::min(std::max(channels, kChannelMultiple), scan.d_inner);
}

// One level's blocks, summed into map.blocks.
absl::Status AddLevel(Gemm& gemm, const Map& map, int64_t span, int64_t depth,
                      cudaStream_t stream) {
  Gemm::Blocks blocks;
  blocks.rows = blocks.cols = span;
  blocks.depth = depth;
  blocks.count = map.padded / (2 * span);  // pairs that are whole
  blocks.a = map.factors + span * depth;
  blocks.b = map.factors;
  blocks.c = map.blocks + span * map.padded;
  blocks.a_stride = blocks.b_stride = depth;
  blocks.c_stride = map.padded;
  blocks.a_step = blocks.b_step = 2 * span * depth;
  blocks.c_step = 2 * span * (map.padded + 1);
  RETURN_IF_ERROR(gemm.AddBlocks(blocks, stream));
  const int64_t border = (2 * blocks.count + 1) * span;  // of the pair that the sequence cuts
  if (border >= map.padded) return absl::OkStatus();
  blocks.a += blocks.count * blocks.a_step;
  blocks.b += blocks.count * blocks.b_step;
  blocks.c += blocks.count * blocks.c_step;
  blocks.rows = map.padded - border;
  blocks.count = 1;
  return gemm.AddBlocks(blocks, stream);
}

}  // namespace

int64_t MeanMapScratchBytes(const ScanParameters& scan) {
  const int64_t padded = Padded(scan.tokens);
  return static_cast<int64_t>(sizeof(float)) *
         (padded * padded + padded * ChannelsOfBlock(scan) * scan.d_state +
          kBaseParts * padded * kBase);
}

absl::Status MeanMap(Gemm& gemm, const ScanParameters& scan, void* scratch, float* out,
                     cudaStream_t stream) {
  MS_CHECK(scan.d_state >= 1 && scan.d_state <= 256);
  if (scan.tokens == 0) return absl::OkStatus();
  Map map = {};
  map.delta = scan.delta;
  map.A = scan.A;
  map.B = scan.B;
  map.C = scan.C;
  map.bc_stride = scan.bc_stride;
  map.D = static_cast<int>(scan.d_inner);
  map.N = static_cast<int>(scan.d_state);
  map.tokens = static_cast<int>(scan.tokens);
  map.padded = static_cast<int>(Padded(scan.tokens));
  const int64_t padded = map.padded;
  map.blocks = static_cast<float*>(scratch);
  map.factors = map.blocks + padded * padded;
  map.base = map.factors + padded * ChannelsOfBlock(scan) * map.N;

  RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(map.blocks, 0, padded * padded * sizeof(float), stream),
                           "mean map"));
  for (int first = 0; first < map.D; first += static_cast<int>(ChannelsOfBlock(scan))) {
    const int channels = std::min(map.D - first, static_cast<int>(ChannelsOfBlock(scan)));
    const int depth = channels * map.N;
    for (int span = kBase; span < padded; span *= 2) {
      const int64_t pairs = (padded + span - 1) / (2 * span);  // that have a border inside
      const dim3 grid((depth + kFactorThreads - 1) / kFactorThreads, static_cast<unsigned>(pairs));
      FactorKernel<<<grid, kFactorThreads, 0, stream>>>(map, span, first, channels);
      RETURN_IF_ERROR(LaunchStatus("mean map's factors"));
      RETURN_IF_ERROR(AddLevel(gemm, map, span, depth, stream));
    }
  }
  const size_t shared = (2 * kBase * map.N + kBaseThreads / 32 * kPairs) * sizeof(float);
  BaseKernel<<<dim3(static_cast<unsigned>(padded / kBase), kBaseParts), kBaseThreads, shared,
               stream>>>(map);
  RETURN_IF_ERROR(LaunchStatus("mean map's base blocks"));
  const dim3 grid((map.tokens + kFactorThreads - 1) / kFactorThreads, std::min(map.tokens, 65535));
  MapKernel<<<grid, kFactorThreads, 0, stream>>>(map, out);
  return LaunchStatus("mean map");
}

}  // namespace mambascope::kernels::cuda
