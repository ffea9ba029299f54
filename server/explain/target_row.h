#pragma once

#include <cstdint>
#include <vector>

#include "mambascope/v1/explanation.pb.h"
#include "server/explain/options.h"
#include "server/explain/subject.h"
#include "server/model/config.h"

namespace mambascope::explain {

// What "the target's row" of a map is: one row, or the mean over the rows of a span of generated
// tokens or over all rows of a classifier that pools the mean.
struct TargetRow {
  // When an explanation is planned, and when it begins.
  TargetRow(const v1::Explanation& explanation, const model::ModelConfig& config, int64_t tokens)
      : TargetRow(explanation, config, tokens, PositionOf(explanation, config, tokens)) {}
  TargetRow(const v1::Explanation& explanation, const Subject& subject)
      : TargetRow(explanation, subject.model->config(), subject.tokens, subject.position) {}

  // RowWeights of the tokens that are read.
  std::vector<float> Weights(const Subject& subject) const {
    std::vector<float> weights = RowWeights(subject);
    weights.resize(prefix);
    return weights;
  }

  int64_t position;  // the target's; of a span the last
  bool spread;       // the mean of several rows
  int64_t prefix;    // the first tokens, which are all that it reads

 private:
  TargetRow(const v1::Explanation& explanation, const model::ModelConfig& config, int64_t tokens,
            int64_t target)
      : position(target),
        spread(config.mean_pooled() || SpanOf(explanation.target()) > 1),
        prefix(ReadTokens(config, target, tokens)) {}
};

// The published code's row is one row: refused where several are meant.
void CheckOneRow(v1::Variant variant, const v1::Explanation& explanation,
                 const model::ModelConfig& config, int64_t tokens, const std::string& field,
                 Violations& violations);

}  // namespace mambascope::explain
