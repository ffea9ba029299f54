#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "mambascope/v1/prediction.pb.h"

namespace mambascope::cli {

// The picture that --image names: a PNG or JPEG as it is, or the one float32 tensor [3, height,
// width] (or [1, 3, height, width]) of a .safetensors file. kInvalidArgument says what is wrong.
absl::StatusOr<v1::Image> ReadImageFile(const std::string& path);

}  // namespace mambascope::cli
