#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace mambascope::model {

// The bytes of a config.json, at most 1 MiB, or of another JSON file within its own limit.
// kNotFound / kInvalidArgument name the file.
absl::StatusOr<std::string> ReadConfigFile(const std::string& path, size_t most_bytes = 1 << 20);

}  // namespace mambascope::model
