#include "server/kernels/cuda/rms_norm.h"

#include <algorithm>

#include "server/base/check.h"
#include "server/kernels/cuda/device.h"
#include "server/kernels/cuda/row_sum.cuh"
#include "server/kernels/scan_body.h"

namespace mambascope::kernels::cuda {
namespace {

constexpr int kMaxParts = 3;

struct Rows {
  float* h;             // [rows, stride]
  const float* add;     // [rows, stride] or null: enters h first
  const float* weight;  // [groups * width] or null
  float* u;             // [rows, stride]
  int64_t rows, stride;
  int64_t groups;
  RowPart parts[kMaxParts];  // [groups] columns of each; `groups` equal ones need only the first
  bool equal_groups;
  float eps;
  bool aligned;  // every part may be read in packets of 16 bytes
};

// kLanes threads a row and group.
template <int kLanes>
__global__ void __launch_bounds__(kRowThreads) NormKernel(const Rows a) {
  __shared__ float shared[kRowThreads];
  const int lane = threadIdx.x % kLanes;
  const int64_t item = int64_t{blockIdx.x} * (kRowThreads / kLanes) + threadIdx.x / kLanes;
  if (item >= a.rows * a.groups) return;  // whole warps, or the whole block, leave together
  const int64_t row = item / a.groups, group = item % a.groups;
  int64_t cols = a.parts[0].cols, first = a.parts[0].begin;
  if (a.equal_groups) {
    first = group * cols;
  } else {
#pragma unroll
    for (int g = 1; g < kMaxParts;
         ++g) {  // constant indices keep the arguments out of local memory
      if (group == g) cols = a.parts[g].cols, first = a.parts[g].begin;
    }
  }
  float* h = a.h + row * a.stride + first;
  const float* add = a.add == nullptr ? nullptr : a.add + row * a.stride + first;
  const float* weight = a.weight == nullptr ? nullptr : a.weight + first;
  float* u = a.u + row * a.stride + first;

  float sum = 0;
  for (int64_t at = lane * body::kPacket; at < cols; at += kLanes * body::kPacket) {
    float4 v = LoadPacket(h, at, cols, a.aligned);
    if (add != nullptr) {
      const float4 w = LoadPacket(add, at, cols, a.aligned);
      v = {v.x + w.x, v.y + w.y, v.z + w.z, v.w + w.w};
      StorePacket(v, h, at, cols, a.aligned);
    }
    sum = fmaf(v.x, v.x, sum);
    sum = fmaf(v.y, v.y, sum);
    sum = fmaf(v.z, v.z, sum);
    sum = fmaf(v.w, v.w, sum);
  }
  sum = RowSum<kLanes>(sum, shared);
  const float s = body::RmsScale(sum, static_cast<float>(cols), a.eps);
  for (int64_t at = lane * body::kPacket; at < cols; at += kLanes * body::kPacket) {
    float4 v = LoadPacket(h, at, cols, a.aligned);
    v = {v.x * s, v.y * s, v.z * s, v.w * s};
    if (weight != nullptr) {
      const float4 w = LoadPacket(weight, at, cols, a.aligned);
      v = {w.x * v.x, w.y * v.y, w.z * v.z, w.w * v.w};
    }
    StorePacket(v, u, at, cols, a.aligned);
  }
}

__global__ void AddKernel(const float* __restrict__ out, int64_t count, float* __restrict__ h) {
  const int64_t step = int64_t{gridDim.x} * kRowThreads;
  for (int64_t i = int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < count; i += step) {
    h[i] += out[i];
  }
}

bool OnPackets(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// `width`: the columns that decide how many lanes a row gets.
absl::Status Launch(Rows a, int64_t width, cudaStream_t stream) {
  if (a.rows == 0) return absl::OkStatus();
  a.aligned = a.stride % body::kPacket == 0 && OnPackets(a.h) && OnPackets(a.u) &&
              (a.add == nullptr || OnPackets(a.add)) &&
              (a.weight == nullptr || OnPackets(a.weight));
  for (int64_t g = 0; g < (a.equal_groups ? 1 : a.groups); ++g) {
    a.aligned &= a.parts[g].cols % body::kPacket == 0 && a.parts[g].begin % body::kPacket == 0;
  }
  const int64_t items = a.rows * a.groups;
  if (body::RowLanes(width) == 32) {
    constexpr int kRows = kRowThreads / 32;
    NormKernel<32>
        <<<static_cast<unsigned>((items + kRows - 1) / kRows), kRowThreads, 0, stream>>>(a);
  } else {
    NormKernel<kRowThreads><<<static_cast<unsigned>(items), kRowThreads, 0, stream>>>(a);
  }
  return LaunchStatus("RMS norm");
}

Rows Dense(const float* h, const float* weight, float eps, int64_t rows, int64_t cols,
           int64_t groups, float* u) {
  Rows a = {};
  a.h = const_cast<float*>(h);  // written only where something is added
  a.weight = weight;
  a.u = u;
  a.rows = rows;
  a.stride = cols;
  a.groups = groups;
  a.parts[0] = {0, cols / groups};
  a.equal_groups = true;
  a.eps = eps;
  return a;
}

}  // namespace

absl::Status RmsNorm(const float* h, const float* weight, float eps, int64_t rows, int64_t cols,
                     float* u, cudaStream_t stream) {
  return Launch(Dense(h, weight, eps, rows, cols, 1, u), cols, stream);
}

absl::Status AddRmsNorm(const float* out, const float* weight, float eps, int64_t rows,
                        int64_t cols, float* h, float* u, cudaStream_t stream) {
  Rows a = Dense(h, weight, eps, rows, cols, 1, u);
  a.add = out;
  return Launch(a, cols, stream);
}

absl::Status GroupRmsNorm(const float* g, const float* weight, float eps, int64_t rows,
                          int64_t cols, int64_t groups, float* out, cudaStream_t stream) {
  MS_CHECK(groups >= 1 && cols % groups == 0);
  return Launch(Dense(g, weight, eps, rows, cols, groups, out), cols / groups, stream);
}

absl::Status RmsScaleInPlace(float* v, int64_t rows, int64_t stride, std::span<const RowPart> parts,
                             float eps, cudaStream_t stream) {
  MS_CHECK(!parts.empty() && parts.size() <= kMaxParts);
  Rows a = {};
  a.h = a.u = v;
  a.rows = rows;
  a.stride = stride;
  a.groups = static_cast<int64_t>(parts.size());
  a.eps = eps;
  std::copy(parts.begin(), parts.end(), a.parts);
  // Narrow and wide parts add in different orders, so each width keeps its own launch.
  int64_t narrow = 0;
  for (const RowPart& part : parts) {
    MS_CHECK(part.begin >= 0 && part.begin + part.cols <= stride);
    narrow += body::RowLanes(part.cols) == 32;
  }
  if (narrow == a.groups || narrow == 0) return Launch(a, parts[0].cols, stream);
  for (const RowPart& part : parts) {
    a.groups = 1;
    a.parts[0] = part;
    if (absl::Status status = Launch(a, part.cols, stream); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status AddInPlace(const float* out, int64_t count, float* h, cudaStream_t stream) {
  if (count == 0) return absl::OkStatus();
  constexpr int64_t kMostBlocks = 4096;
  const int64_t blocks = std::min((count + kRowThreads - 1) / kRowThreads, kMostBlocks);
  AddKernel<<<static_cast<unsigned>(blocks), kRowThreads, 0, stream>>>(out, count, h);
  return LaunchStatus("residual add");
}

}  // namespace mambascope::kernels::cuda
