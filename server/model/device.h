#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace mambascope::model {

// Where a model's forward pass runs. Everything else (tokens, sampling, explanations) stays on the
// host. Server code that only passes a device on needs no CUDA.
struct Device {
  enum class Kind { kCpu, kCuda };
  Kind kind = Kind::kCpu;
  int index = 0;  // of kCuda, as the driver counts

  bool operator==(const Device&) const = default;
};
std::string Name(const Device& device);  // "cpu", "cuda:0"

// "cpu", "cuda" (the first) or "cuda:N". kInvalidArgument: no such word; kNotFound: no such device
// here, or a build without CUDA. Both name the flag, its value and what exists.
absl::StatusOr<Device> ParseDevice(absl::string_view text);

// "NVIDIA H200, compute 9.0, 132 multiprocessors"; empty for the CPU, or if the driver fails.
std::string Describe(const Device& device);

// Of a device of its own memory; kUnimplemented for the CPU. Any thread.
struct DeviceMemory {
  int64_t used_bytes = 0, total_bytes = 0;  // used by all processes
};
absl::StatusOr<DeviceMemory> MemoryOf(const Device& device);

}  // namespace mambascope::model
