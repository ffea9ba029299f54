#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/base/array.h"
#include "server/kernels/cuda/device.h"
#include "server/kernels/cuda/gemm.h"
#include "server/kernels/cuda/pinned.h"
#include "server/model/cuda/upload.h"
#include "server/model/device_model.h"

namespace mambascope::model::cuda {

// The stream of an executor's passes on one device, and their buffers, which grow to the largest
// pass and stay. One pass at a time.
struct PassWorkspace : DeviceWorkspace {
  static absl::StatusOr<std::unique_ptr<PassWorkspace>> Create(int index);
  PassWorkspace(int index, kernels::cuda::Stream stream, kernels::cuda::Gemm gemm);

  const int index;  // of the device
  const kernels::cuda::Stream stream;
  kernels::cuda::Gemm gemm;
  Upload upload;
  // As in Workspace; rows are rounded up to what the GEMM covers.
  kernels::cuda::DeviceArray<float> h, u, xz, x, selective, dt, gated, y, out;
  kernels::cuda::DeviceArray<float> flipped_xz, flipped_gated, patches, embedded;  // Vim
  kernels::cuda::DeviceArray<float> means, head_rows, logits;
  kernels::cuda::DeviceArray<float> records;      // what the traces get, scan by scan
  kernels::cuda::DeviceArray<int32_t> nonfinite;  // [layers + 1, pieces] flags
  kernels::cuda::DeviceArray<std::byte> scratch;  // of the GEMM
  // Where results land on the host.
  kernels::cuda::PinnedArray<float> host_records, host_logits;
  kernels::cuda::PinnedArray<int32_t> host_nonfinite;
  Array<float> host_patches;
};

}  // namespace mambascope::model::cuda
