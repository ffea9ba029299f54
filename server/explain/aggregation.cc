#include "server/explain/aggregation.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/explain/text_segments.h"

namespace mambascope::explain {
namespace {

constexpr int kMaxSpans = 64;

double Sum(std::span<const float> scores) {
  return std::accumulate(scores.begin(), scores.end(), 0.0);
}

std::string Spell(const v1::ByteSpan& span) {
  return absl::StrCat("[", span.begin(), ", ", span.end(), ")");
}

void CheckSpans(const v1::Aggregation& options, size_t text_bytes, const std::string& field,
                Violations& violations) {
  if (options.spans_size() > kMaxSpans) {
    violations.Add(field,
                   absl::StrCat(options.spans_size(), " spans exceed the limit ", kMaxSpans));
  }
  const int count = std::min(options.spans_size(), kMaxSpans);
  for (int i = 0; i < count; ++i) {
    const v1::ByteSpan& span = options.spans(i);
    const std::string path = absl::StrCat(field, "[", i, "]");
    if (span.begin() >= span.end()) {
      violations.Add(path, absl::StrCat(Spell(span), " holds no byte"));
    } else if (span.end() > text_bytes) {
      violations.Add(
          path, absl::StrCat(Spell(span), " is beyond the ", text_bytes, " bytes of the text"));
    }
    for (int j = 0; j < i; ++j) {
      const v1::ByteSpan& earlier = options.spans(j);
      if (std::max(span.begin(), earlier.begin()) < std::min(span.end(), earlier.end())) {
        violations.Add(path,
                       absl::StrCat(Spell(span), " overlaps ", Spell(earlier), " of entry ", j));
        break;
      }
    }
  }
}

// Which segment holds the byte; -1: none, it is past the text.
int64_t SegmentOf(uint32_t byte, const std::vector<uint32_t>& starts, size_t text_bytes) {
  if (byte >= text_bytes) return -1;
  return std::upper_bound(starts.begin(), starts.end(), byte) - starts.begin() - 1;
}

v1::GroupedScores BySegments(const char* kind, const std::vector<uint32_t>& starts,
                             size_t text_bytes, std::span<const TokenSpan> tokens,
                             std::span<const float> scores) {
  v1::GroupedScores grouped;
  grouped.set_kind(kind);
  v1::GroupedScores::Group* group = nullptr;
  int64_t segment = 0;  // of the group
  for (size_t t = 0; t < tokens.size(); ++t) {
    const TokenSpan& token = tokens[t];
    const int64_t own = SegmentOf(token.begin, starts, text_bytes);
    if (group == nullptr || token.special || group->special() || own != segment) {
      if (group != nullptr) group->set_end_byte(std::min(group->end_byte(), token.begin));
      group = grouped.add_groups();
      group->set_begin_byte(token.begin);
      group->set_end_byte(token.begin);
      group->set_begin_token(static_cast<int32_t>(t));
      group->set_special(token.special);
      segment = own;
    }
    group->set_end_token(static_cast<int32_t>(t + 1));
    if (!token.special) group->set_end_byte(std::max(group->end_byte(), token.end));
    group->set_score(group->score() + scores[t]);
  }
  return grouped;
}

v1::GroupedScores BySpans(const v1::Aggregation& options, std::span<const TokenSpan> tokens,
                          std::span<const float> scores) {
  v1::GroupedScores grouped;
  grouped.set_kind("spans");
  std::vector<bool> taken(tokens.size());
  for (const v1::ByteSpan& span : options.spans()) {
    size_t begin = 0, end = 0;
    for (size_t t = 0; t < tokens.size(); ++t) {
      const bool empty = tokens[t].begin == tokens[t].end;
      if (empty || tokens[t].begin < span.begin() || tokens[t].begin >= span.end()) continue;
      if (end == 0) begin = t;
      end = t + 1;
    }
    v1::GroupedScores::Group* group = grouped.add_groups();
    group->set_begin_byte(span.begin());
    group->set_end_byte(span.end());
    group->set_begin_token(static_cast<int32_t>(begin));
    group->set_end_token(static_cast<int32_t>(end));
    group->set_score(Sum(scores.subspan(begin, end - begin)));
    std::fill(taken.begin() + static_cast<int64_t>(begin),
              taken.begin() + static_cast<int64_t>(end), true);
  }
  double rest = 0;
  for (size_t t = 0; t < tokens.size(); ++t) rest += taken[t] ? 0.0 : double{scores[t]};
  grouped.set_rest(rest);
  return grouped;
}

}  // namespace

TokenSpan SpanOf(const v1::Token& token) {
  return {token.begin_byte(), token.end_byte(), token.special()};
}

void CheckAggregation(const v1::Aggregation& options, const std::string* text,
                      const model::ModelConfig& config, const std::string& field,
                      Violations& violations) {
  const auto needs_text = [&](const char* name) {
    violations.Add(absl::StrCat(field, ".", name), "needs a text; the input is none");
  };
  if (text == nullptr && options.words()) needs_text("words");
  if (text == nullptr && options.sentences()) needs_text("sentences");
  if (text == nullptr && options.spans_size() > 0) needs_text("spans");
  if (text != nullptr) CheckSpans(options, text->size(), field + ".spans", violations);
  if (options.pixels() && config.family != model::Family::kVim) {
    violations.Add(field + ".pixels", "is for image models only");
  }
}

bool OneScorePerToken(const v1::TensorInfo& main, int64_t tokens) {
  return main.axes_size() == 1 && main.axes(0).name() == "input_tokens" &&
         main.axes(0).size() == tokens && main.dtype() != v1::DATA_TYPE_INT32;
}

bool OneScorePerToken(const Plan& plan, int64_t tokens) {
  return !plan.tensors.empty() && OneScorePerToken(plan.tensors.front(), tokens);
}

std::vector<v1::GroupedScores> Aggregate(const v1::Aggregation& options, absl::string_view text,
                                         std::span<const TokenSpan> tokens,
                                         std::span<const float> scores) {
  MS_CHECK(scores.size() >= tokens.size());
  std::vector<TokenSpan> all(tokens.begin(), tokens.end());
  const auto end = static_cast<uint32_t>(text.size());
  all.resize(scores.size(), {end, end, false});
  std::vector<v1::GroupedScores> grouped;
  if (options.words()) {
    grouped.push_back(BySegments("words", WordStarts(text), text.size(), all, scores));
  }
  if (options.sentences()) {
    grouped.push_back(BySegments("sentences", SentenceStarts(text), text.size(), all, scores));
  }
  if (options.spans_size() > 0) grouped.push_back(BySpans(options, all, scores));
  return grouped;
}

}  // namespace mambascope::explain
