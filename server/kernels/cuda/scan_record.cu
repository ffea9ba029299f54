#include "server/kernels/cuda/scan_record.h"

#include "server/kernels/cuda/device.h"

namespace mambascope::kernels::cuda {
namespace {

constexpr int kThreads = 128;  // of a token; at mamba-130m's size it has 144 numbers

__global__ void __launch_bounds__(kThreads)
    RecordKernel(const ScanRecord in, const ScanRecordOutputs out) {
  const int64_t r = blockIdx.x, t = in.tokens[r];
  float* selective = out.selective + r * (in.parts[0].cols + in.parts[1].cols);
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const ScanRecord::Part& part = in.parts[p];
    const float* from = part.values + t * part.stride;
    for (int64_t k = threadIdx.x; k < part.cols; k += kThreads) selective[k] = from[k];
    selective += part.cols;
  }
  for (int64_t c = threadIdx.x; c < in.checked; c += kThreads) {
    const int64_t d = in.channels[c];
    const float x = in.x[t * in.x_stride + d];
    out.x_checked[r * in.checked + c] = x;
    out.y_checked[r * in.checked + c] =
        in.y[t * in.y_stride + d] + in.D[d / in.channels_per_skip] * x;
  }
}

}  // namespace

absl::Status RecordScan(const ScanRecord& in, const ScanRecordOutputs& out, cudaStream_t stream) {
  if (in.count == 0) return absl::OkStatus();
  RecordKernel<<<static_cast<unsigned>(in.count), kThreads, 0, stream>>>(in, out);
  return LaunchStatus("scan record");
}

}  // namespace mambascope::kernels::cuda
