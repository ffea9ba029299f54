#include "server/explain/target_row.h"

#include "absl/strings/str_cat.h"

namespace mambascope::explain {

void CheckOneRow(v1::Variant variant, const v1::Explanation& explanation,
                 const model::ModelConfig& config, int64_t tokens, const std::string& field,
                 Violations& violations) {
  if (!IsCode(variant) || !TargetRow(explanation, config, tokens).spread) return;
  violations.Add(field + ".variant",
                 absl::StrCat(v1::Variant_Name(variant), " does not go with ",
                              config.mean_pooled() ? "a model that pools the mean of all tokens"
                                                   : "a span of generated tokens",
                              ", because it explains a single row"));
}

}  // namespace mambascope::explain
