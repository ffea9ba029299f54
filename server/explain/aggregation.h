#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "mambascope/v1/explanation.pb.h"
#include "mambascope/v1/prediction.pb.h"
#include "server/explain/method.h"
#include "server/explain/violations.h"
#include "server/model/config.h"

namespace mambascope::explain {

// Sums of scores over groups of tokens, for people. Each token is in one group (of spans: or in
// their rest), so that the sums keep the total; they are in double.

// Where a token stands in the text, as v1::Token says.
struct TokenSpan {
  uint32_t begin = 0, end = 0;  // bytes, half-open
  bool special = false;
};
TokenSpan SpanOf(const v1::Token& token);

// Adds what is wrong with the options; `field` is their path. `text` null: the input is not a text.
void CheckAggregation(const v1::Aggregation& options, const std::string* text,
                      const model::ModelConfig& config, const std::string& field,
                      Violations& violations);

// Whether the main tensor is one score for each of the input's tokens.
bool OneScorePerToken(const Plan& plan, int64_t tokens);
bool OneScorePerToken(const v1::TensorInfo& main, int64_t tokens);

// Words and sentences (text_segments.h) take the tokens whose first byte is in them, so the tokens
// of one split character stay together. Special tokens stand alone; tokens that follow no text (and
// those of `scores` beyond `tokens`) are a group without bytes. Groups without tokens do not exist:
// a token over several words is in the first. The bytes of a group are those of its tokens, leading
// whitespace too; groups do not overlap.
// Spans take the tokens whose first byte is in them and the empty ones between those; there is one
// group for each, in the order asked for.
// tokens: of the text, begins not decreasing; scores: at least as many. Needs checked options.
std::vector<v1::GroupedScores> Aggregate(const v1::Aggregation& options, absl::string_view text,
                                         std::span<const TokenSpan> tokens,
                                         std::span<const float> scores);

}  // namespace mambascope::explain
