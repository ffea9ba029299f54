#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// Reads `METHOD[:key=value,...]`. Methods and keys are what the descriptor of Explanation holds, so
// a new method in the proto can be asked for without a line here; values as field_option.h says.
// Every method also takes
//   id, target, contrast    as the flags of the same names; generated=K or A-B: as target=gen:K
//   words, sentences, spans, pixels    the fields of Aggregation
//   faithfulness[=...], faithfulness_...    as faithfulness_option.h says
// Keys whose value is true or false, and `faithfulness`, may stand alone. kInvalidArgument says
// what exists instead.
absl::StatusOr<v1::Explanation> ParseExplain(absl::string_view option);

// The methods with their keys and values, for --help.
std::string ExplainHelp();

}  // namespace mambascope::cli
