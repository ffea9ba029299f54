#pragma once

#include <cstdint>
#include <string>

#include "mambascope/v1/explanation.pb.h"
#include "server/explain/violations.h"
#include "server/model/config.h"
#include "server/model/layer_trace.h"

namespace mambascope::explain {

// What LaTIM and the lenses ask of a target alike.

// Of a target that is one position: no span of generated tokens.
void CheckSinglePosition(const v1::Explanation& explanation, const std::string& field,
                         Violations& violations);

// Neighbouring rows.
struct RowRange {
  int64_t first = 0, count = 0;
  int64_t end() const { return first + count; }
};
// The rows that "the target's row" means: its position, all of a span, or all that a classifier
// pools; RowWeights says how much each counts.
RowRange TargetRowsOf(const v1::Explanation& explanation, const model::ModelConfig& config,
                      int64_t tokens);

// The bound of LaTIM's errors: fp32 sums over the length and the channels, some 1e-6 on models of
// this size and more where contributions cancel.
constexpr double kLatimTolerance = 1e-3;

}  // namespace mambascope::explain
