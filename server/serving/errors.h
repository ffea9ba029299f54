#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace mambascope::serving {

// Statuses that tell a client when to try again (payload google.rpc.RetryInfo).
absl::Status WithRetryInfo(absl::Status status, absl::Duration delay);

// The canonical name of a status code, as "DEADLINE_EXCEEDED": what metrics and logs say.
absl::string_view CodeName(absl::StatusCode code);

}  // namespace mambascope::serving
