#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// Reads `METHOD[:key=value,...]`. Methods and keys are what the descriptor of Explanation holds, so
// a new method in the proto can be asked for without a line here. Beside a method's fields there is
// `id`. Values by the field's type:
//   enum            its value in lower case without the prefix: reduction=abs_mean
//   ranges          (messages of `begin` and `end`) a-b inclusive, or one number: layers=0-3+5
//   repeated        joined by +; integers also as a-b: channels=1+2+8-15
//   bool            true, false, 1, 0
// kInvalidArgument says what exists instead.
absl::StatusOr<v1::Explanation> ParseExplain(absl::string_view option);

// Reads `POS[:TOKEN]`: the position, then an id if it is an integer, else the token's text.
absl::Status ParseTarget(absl::string_view option, v1::Target* target);
// Reads TOKEN for the contrast.
absl::Status ParseContrast(absl::string_view option, v1::Target* target);

// The methods with their keys and values, for --help.
std::string ExplainHelp();

}  // namespace mambascope::cli
