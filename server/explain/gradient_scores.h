#pragma once

#include <memory>

#include "absl/strings/string_view.h"
#include "server/explain/method.h"
#include "server/kernels/backward_rule.h"

namespace mambascope::explain {

// The method whose score of a token is its embedding times the gradient of f by it, under a rule:
// gradient x input or MambaLRP (methods.md, section 6).
std::unique_ptr<const Method> NewGradientScores(absl::string_view name, kernels::BackwardRule rule);

}  // namespace mambascope::explain
