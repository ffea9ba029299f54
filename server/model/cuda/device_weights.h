#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"
#include "server/kernels/cuda/device.h"
#include "server/model/config.h"
#include "server/model/weights.h"

namespace mambascope::model::cuda {

// A model's weights in device memory, in the dtypes that they have on the host: bf16 stays bf16.
class DeviceWeights {
 public:
  // Copies all of them to the calling thread's device and waits. kResourceExhausted when its memory
  // is short.
  static absl::StatusOr<DeviceWeights> Upload(const ModelConfig& config, const WeightViews& host,
                                              const kernels::cuda::Stream& stream);

  // Pointers of the device. Rows of bf16 matrices start on 16 bytes, those of the embeddings are
  // dense.
  const WeightViews& views() const { return views_; }

 private:
  DeviceWeights() = default;

  absl::Status AddNumbers(const float*& numbers, int64_t count, cudaStream_t stream);
  absl::Status AddMatrix(kernels::WeightMatrix& matrix, int64_t stride, cudaStream_t stream);
  absl::StatusOr<const void*> Add(const std::byte* from, int64_t bytes, cudaStream_t stream);

  std::vector<kernels::cuda::DeviceArray<std::byte>> arrays_;
  WeightViews views_;
};

}  // namespace mambascope::model::cuda
