#include "server/explain/latim_target.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/explain/options.h"

namespace mambascope::explain {
namespace {

// Generated tokens that the target spans; 1 for any other target.
int64_t Span(const v1::Target& target) {
  if (!target.has_generated() || !target.has_generated_end()) return 1;
  return std::max<int64_t>(1, int64_t{target.generated_end()} - target.generated());
}

// The target stands beside the method's options.
std::string TargetField(const std::string& field) {
  const size_t dot = field.rfind('.');
  return (dot == std::string::npos ? "" : field.substr(0, dot + 1)) + "target";
}

}  // namespace

void CheckLogitTarget(const v1::Explanation& explanation, const std::string& field,
                      Violations& violations) {
  if (explanation.target().value() != v1::OUTPUT_VALUE_LOG_PROBABILITY) return;
  violations.Add(TargetField(field) + ".value",
                 "OUTPUT_VALUE_LOG_PROBABILITY: contributions are parts of a logit, which "
                 "OUTPUT_VALUE_LOGIT explains; of log-probabilities there is gradient_x_input");
}

void CheckSinglePosition(const v1::Explanation& explanation, const std::string& field,
                         Violations& violations) {
  const int64_t span = Span(explanation.target());
  if (span == 1) return;
  violations.Add(TargetField(field) + ".generated_end",
                 absl::StrCat(explanation.target().generated_end(), " makes a span of ", span,
                              " tokens, and an edge leads to one position: explain one generated "
                              "token at a time"));
}

RowRange TargetRowsOf(const v1::Explanation& explanation, const model::ModelConfig& config,
                      int64_t tokens) {
  if (config.mean_pooled()) return {0, tokens};
  const int64_t position = PositionOf(explanation, config, tokens);
  const int64_t count = std::min(Span(explanation.target()), position + 1);
  return {position + 1 - count, count};
}

int32_t RecomputedLayers(const std::vector<int32_t>& layers, int32_t stream_stride) {
  int32_t first = 0, reached = 0, recomputed = 0;
  for (const int32_t layer : layers) {
    const int32_t recorded = layer / stream_stride * stream_stride;
    if (recorded == layer) continue;
    if (recorded != first) reached = first = recorded;
    recomputed += std::max(0, layer - reached);
    reached = std::max(reached, layer);
  }
  return recomputed;
}

}  // namespace mambascope::explain
