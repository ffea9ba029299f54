#pragma once

#include <vector>

#include "absl/strings/string_view.h"
#include "mambascope/v1/explanation.pb.h"
#include "server/explain/method.h"

namespace mambascope::explain {

// All methods in the order of methods.inc.
const std::vector<const Method*>& AllMethods();
// Null if there is none of that name.
const Method* FindMethod(absl::string_view name);
// The name of the method that `explanation` asks for; empty if it names none.
absl::string_view MethodName(const v1::Explanation& explanation);

}  // namespace mambascope::explain
