#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "mambascope/v1/prediction.pb.h"

namespace mambascope::cli {

// How tensors travel, as options. kInvalidArgument says what may be given.

// fp32, fp16 or uint8.
absl::Status ParseDeliveryType(absl::string_view option, v1::Delivery* delivery);
// top_k:N, threshold:X or mass:X.
absl::Status ParseSparse(absl::string_view option, v1::Delivery* delivery);

}  // namespace mambascope::cli
