#pragma once

#include <ostream>

#include "absl/status/status.h"
#include "google/protobuf/message.h"

namespace mambascope::cli {

// Writes the message as protobuf JSON on one line: proto field names, enums by name, fields with
// their default value left out. Error details of types that this program does not know are left out
// too. kUnavailable if `out` takes no more.
absl::Status WriteJsonLine(const google::protobuf::Message& message, std::ostream& out);

}  // namespace mambascope::cli
