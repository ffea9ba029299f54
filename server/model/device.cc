#include "server/model/device.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/model/device_model.h"
#if MAMBASCOPE_CUDA
#include "server/model/cuda/device_model.h"
#endif

namespace mambascope::model {
namespace {

#if MAMBASCOPE_CUDA
using cuda::DeviceCount;
constexpr char kBuild[] = "";
#else
int DeviceCount() { return 0; }
constexpr char kBuild[] = "; this server was built without CUDA";
#endif

std::string WhatExists() {
  std::string names = "cpu";
  for (int i = 0; i < DeviceCount(); ++i) absl::StrAppend(&names, ", cuda:", i);
  return names;
}

}  // namespace

std::string Name(const Device& device) {
  return device.kind == Device::Kind::kCpu ? "cpu" : absl::StrCat("cuda:", device.index);
}

absl::StatusOr<Device> ParseDevice(absl::string_view text) {
  if (text == "cpu") return Device{};
  Device device{Device::Kind::kCuda, 0};
  const absl::string_view number = text.substr(0, 5) == "cuda:" ? text.substr(5) : "";
  const bool numbered = number.size() <= 4 && absl::SimpleAtoi(number, &device.index) &&
                        number == absl::StrCat(device.index);  // no sign, no blank, no leading 0
  if (text != "cuda" && !(numbered && device.index >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("device: '", text.substr(0, 64),
                     "' is not cpu, cuda or cuda:N; there is: ", WhatExists(), kBuild));
  }
  if (device.index >= DeviceCount()) {
    return absl::NotFoundError(
        absl::StrCat("device: '", text, "' does not exist; there is: ", WhatExists(), kBuild));
  }
  return device;
}

std::string Describe(const Device& device) {
#if MAMBASCOPE_CUDA
  if (device.kind == Device::Kind::kCuda) return cuda::Describe(device.index);
#endif
  (void)device;
  return "";
}

absl::StatusOr<DeviceMemory> MemoryOf(const Device& device) {
#if MAMBASCOPE_CUDA
  if (device.kind == Device::Kind::kCuda) return cuda::MemoryOf(device.index);
#endif
  return absl::UnimplementedError(absl::StrCat(Name(device), " has no memory of its own"));
}

absl::StatusOr<std::unique_ptr<const DeviceModel>> NewDeviceModel(const Device& device,
                                                                  const ModelConfig& config,
                                                                  const WeightViews& weights) {
#if MAMBASCOPE_CUDA
  if (device.kind == Device::Kind::kCuda) {
    return cuda::NewModel(device.index, config, weights);
  }
#endif
  (void)config;
  (void)weights;
  return absl::UnimplementedError(absl::StrCat("no model runs on ", Name(device), kBuild));
}

}  // namespace mambascope::model
