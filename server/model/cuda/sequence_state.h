#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/kernels/cuda/device.h"
#include "server/model/config.h"
#include "server/model/recurrent_state.h"

namespace mambascope::model::cuda {

// A sequence's conv_state and ssm_state of all layers in one piece of device memory, and the sums
// of models that pool the mean. Numbers and layout are RecurrentState's. One pass at a time.
class SequenceState : public DeviceState {
 public:
  // Zeros, on the calling thread's device; waits until they are. kResourceExhausted when its memory
  // is short.
  static absl::StatusOr<std::unique_ptr<DeviceState>> Create(const ModelConfig& config,
                                                             const kernels::cuda::Stream& stream);

  // Of the device. scan = layer x directions + direction.
  float* conv_state(int64_t scan) { return values_.data() + scan * (sizes_.conv + sizes_.ssm); }
  float* ssm_state(int64_t scan) { return conv_state(scan) + sizes_.conv; }
  double* pooled() { return pooled_.data(); }

  absl::Status Read(std::span<float> values, std::span<double> pooled) const override;

 private:
  SequenceState() = default;

  StateSizes sizes_;
  kernels::cuda::DeviceArray<float> values_;
  kernels::cuda::DeviceArray<double> pooled_;
};

}  // namespace mambascope::model::cuda
