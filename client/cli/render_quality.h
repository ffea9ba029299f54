#pragma once

#include <string>
#include <vector>

#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// The measured errors and whether they are within their tolerance, in a few short lines; none
// where nothing was measured.
std::vector<std::string> QualityLines(const v1::ExplanationFinished& end);

}  // namespace mambascope::cli
