#pragma once

#include <cstdint>
#include <string>

#include "mambascope/v1/explanation.pb.h"
#include "server/explain/violations.h"
#include "server/model/config.h"
#include "server/model/layer_trace.h"

namespace mambascope::explain {

// What LaTIM, the lenses and other methods of logits ask of a target alike.

// They take a logit apart: no log-probability. `field` is the path of the method's options.
void CheckLogitTarget(const v1::Explanation& explanation, const std::string& field,
                      Violations& violations);
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

// Calls of StreamWalk::Prepare that return false when these layers are visited in this order.
int32_t RecomputedLayers(const std::vector<int32_t>& layers, int32_t stream_stride);

// The bound of LaTIM's errors: fp32 sums over the length and the channels, some 1e-6 on models of
// this size and more where contributions cancel.
constexpr double kLatimTolerance = 1e-3;

}  // namespace mambascope::explain
