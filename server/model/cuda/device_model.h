#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/model/device.h"
#include "server/model/device_model.h"

// What model/device.h and model/device_model.h promise, for CUDA. Only in builds with it; these
// names need none of its headers.
namespace mambascope::model::cuda {

int DeviceCount();
std::string Describe(int index);
absl::StatusOr<DeviceMemory> MemoryOf(int index);
absl::StatusOr<std::unique_ptr<const DeviceModel>> NewModel(int index, const ModelConfig& config,
                                                            const WeightViews& weights);

}  // namespace mambascope::model::cuda
