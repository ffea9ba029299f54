#pragma once

#include <string>

#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// What is explained and its value, in one line. Not escaped. `classes`: of a classifier.
std::string TargetText(const v1::ResolvedTarget& target, v1::OutputValue value, bool classes);

}  // namespace mambascope::cli
