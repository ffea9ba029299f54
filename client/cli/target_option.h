#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// What is explained, as options. Each sets its part of `target`; kInvalidArgument shows an example.

// POS[:TOKEN]     the position, then an id if it is an integer, else the token's text
// gen:K[:TOKEN]   the generated token of index K, or another in its place
// gen:A-B         the generated tokens A to B, inclusive
// class:NUMBER    of a classifier
absl::Status ParseTarget(absl::string_view option, v1::Target* target);
// K or A-B: as after gen: above.
absl::Status ParseGenerated(absl::string_view option, v1::Target* target);
// TOKEN or class:NUMBER.
absl::Status ParseContrast(absl::string_view option, v1::Target* target);
// logit or log_probability.
absl::Status ParseTargetValue(absl::string_view option, v1::Target* target);

// Takes from `common` what `target` leaves open: where and what together, the contrast, the value.
void FillTarget(const v1::Target& common, v1::Target* target);

}  // namespace mambascope::cli
