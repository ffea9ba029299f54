#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace mambascope::model {

// The bytes of a config.json, at most 1 MiB. kNotFound / kInvalidArgument name the file.
absl::StatusOr<std::string> ReadConfigFile(const std::string& path);

}  // namespace mambascope::model
