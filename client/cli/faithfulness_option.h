#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// How far the model agrees with scores, as options.

// zero, delete or token:ID: what removing a token means. kInvalidArgument names the three.
absl::Status ParseRemoval(absl::string_view option, v1::Faithfulness* faithfulness);

// Option keys beside it, each of one field: faithfulness_draws, faithfulness_seed,
// faithfulness_shares, faithfulness_points.
bool IsFaithfulnessKey(absl::string_view key);
absl::Status SetFaithfulnessKey(absl::string_view key, absl::string_view value,
                                v1::Faithfulness* faithfulness);
std::vector<std::string> FaithfulnessKeys();

// Whether the main tensor is one score for each input token, as far as the options tell.
bool GivesScores(const v1::Explanation& explanation);

}  // namespace mambascope::cli
