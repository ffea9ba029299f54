#include "server/explain/latim_target.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/explain/options.h"

namespace mambascope::explain {
void CheckSinglePosition(const v1::Explanation& explanation, const std::string& field,
                         Violations& violations) {
  const int64_t span = SpanOf(explanation.target());
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
  const int64_t count = std::min(SpanOf(explanation.target()), position + 1);
  return {position + 1 - count, count};
}

}  // namespace mambascope::explain
