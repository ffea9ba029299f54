// What people are shown beside scores and maps.
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "client/cli/render_agreement.h"
#include "client/cli/render_faithfulness.h"
#include "client/cli/render_groups.h"
#include "client/cli/render_lens.h"
#include "client/cli/render_patches.h"
#include "client/cli/render_quality.h"
#include "client/cli/render_statistics.h"
#include "client/cli/target_text.h"

namespace mambascope::cli {
namespace {

const Screen kPlain = {.color = false, .truecolor = false, .utf8 = true, .width = 80};
const Screen kColor = {.color = true, .truecolor = false, .utf8 = true, .width = 80};

const std::vector<TokenLabel> kTokens = {{"<s>", true, 0}, {"The", false, 1}, {" cat", false, 2}};

// Every part stands in the text, in this order.
void ExpectInOrder(const std::string& text, const std::vector<std::string>& parts) {
  size_t at = 0;
  for (const std::string& part : parts) {
    const size_t found = text.find(part, at);
    ASSERT_NE(found, std::string::npos) << part << "\n" << text;
    at = found + part.size();
  }
}

v1::FaithfulnessReport Report() {
  v1::FaithfulnessReport report;
  const auto set = [](v1::FaithfulnessReport::Against* against, double value) {
    against->set_value(value);
    against->set_random_mean(0.5);
    against->set_random_low(0.4);
    against->set_random_high(0.6);
  };
  set(report.mutable_deletion_most_auc(), 0.1);
  set(report.mutable_deletion_least_auc(), 0.55);
  set(report.mutable_insertion_most_auc(), 0.9);
  set(report.mutable_insertion_least_auc(), 0.7);
  report.add_shares(0.1f);
  set(report.add_comprehensiveness(), 0.8);
  set(report.add_sufficiency(), 0.8);
  report.set_random_draws(10);
  report.set_candidates(12);
  return report;
}

std::string FaithfulnessText(const v1::FaithfulnessReport& report) {
  std::ostringstream out;
  RenderFaithfulness(kPlain, report, out);
  return out.str();
}

TEST(RenderFaithfulness, ComparesEachNumberWithRandomOrders) {
  ExpectInOrder(
      FaithfulnessText(Report()),
      {"12 tokens removed in order, 10 random orders", "deletion area, best first", "0.1", "0.5",
       "0.4 to 0.6", "better than random", "deletion area, least first", "as random",
       "insertion area, best first", "better than random", "insertion area, least first",
       "WORSE than random", "comprehensiveness 10 %", "better than random", "sufficiency 10 %",
       "WORSE than random", "the model agrees with these scores"});
}

TEST(RenderFaithfulness, SaysWhatTheCurvesAgreeOn) {
  v1::FaithfulnessReport report = Report();
  report.mutable_insertion_most_auc()->set_value(0.5);
  EXPECT_TRUE(absl::StrContains(FaithfulnessText(report), "agrees in part: it needs"));
  report.mutable_deletion_most_auc()->set_value(0.9);
  EXPECT_TRUE(absl::StrContains(FaithfulnessText(report), "does not agree"));
  report.mutable_insertion_most_auc()->set_value(0.3);
  EXPECT_TRUE(absl::StrContains(FaithfulnessText(report), "disagrees"));
  report.mutable_insertion_most_auc()->set_value(0.7);
  EXPECT_TRUE(absl::StrContains(FaithfulnessText(report), "agrees in part: the best tokens"));
  report.mutable_deletion_most_auc()->clear_random_mean();
  EXPECT_TRUE(absl::StrContains(FaithfulnessText(report), "no random orders"));
}

TEST(RenderGroups, ShowsTheTextOfEachGroupWithItsScore) {
  v1::GroupedScores scores;
  scores.set_kind("spans");
  auto* special = scores.add_groups();
  special->set_end_token(1);
  special->set_special(true);
  special->set_score(0.25);
  auto* word = scores.add_groups();
  word->set_begin_byte(3);
  word->set_end_byte(7);
  word->set_begin_token(2);
  word->set_end_token(3);
  word->set_score(-0.5);
  scores.set_rest(1.5);
  std::ostringstream out;
  RenderGroups(kPlain, scores, "The cat", kTokens, out);
  ExpectInOrder(out.str(), {"spans", "<s>", "+0.25", "2  \u2423cat", "-0.5", "the rest +1.5"});
}

TEST(RenderAgreements, UndefinedCoefficientsAreDashes) {
  google::protobuf::RepeatedPtrField<v1::Agreement> agreements;
  auto* pair = agreements.Add();
  pair->set_first_id("a");
  pair->set_second_id("b\x1b");
  pair->set_spearman(0.5);
  pair->set_top_overlap(0.6);
  pair->set_top(5);
  std::ostringstream out;
  RenderAgreements(kPlain, agreements, out);
  ExpectInOrder(out.str(), {"agreement", "Spearman", "a", "b\\x1b", "+0.500", "-", "3 of 5"});
  std::ostringstream none;
  RenderAgreements(kPlain, {}, none);
  EXPECT_EQ(none.str(), "");
}

TEST(RenderLens, NamesTheBestTokensOfEachLayerAndPosition) {
  v1::TensorInfo info;
  for (const auto& [name, size] : {std::pair{"layers", 1}, {"positions", 2}, {"rank", 2}}) {
    info.add_axes()->set_name(name);
    info.mutable_axes()->rbegin()->set_size(size);
  }
  info.mutable_axes(0)->add_labels(5);
  info.mutable_axes(1)->add_labels(2);
  info.mutable_axes(1)->add_labels(40);
  const std::vector<float> values = {3, 2, 1.5f, -1};
  const std::vector<int32_t> ids = {7, 8, 8, 9};
  std::ostringstream out;
  RenderLens(kPlain, info, values, ids, kTokens, {{{7, " dog"}, {9, "\x1b"}}, "#"}, out);
  ExpectInOrder(out.str(), {"layer", "position", "best tokens", "5", "@2 \u2423cat",
                            "\u2423dog +3  #8 +2", "5", "@40", "#8 +1.5  \\x1b -1"});
}

TEST(QualityLines, NameTheMeasureAndTheVerdict) {
  v1::ExplanationFinished end;
  EXPECT_TRUE(QualityLines(end).empty());
  v1::Quality& quality = *end.mutable_quality();
  quality.set_tolerance(1e-3f);
  quality.mutable_completeness()->set_sum(1.5);
  quality.mutable_completeness()->set_expected(2);
  quality.mutable_completeness()->set_relative_error(0.25);
  quality.set_bias_relevance(0.1);
  quality.set_bias_share(0.05);
  quality.mutable_decomposition()->add_relative_error_by_layer(1e-6f);
  quality.mutable_decomposition()->add_relative_error_by_layer(2e-6f);
  end.add_digests()->set_tensor("row");
  end.add_mass_kept(0.75f);
  const auto lines = QualityLines(end);
  ASSERT_EQ(lines.size(), 2u);
  ExpectInOrder(lines[0], {"decomposition error 2e-06 (the worst of 2 layers)",
                           "the parts sum to 1.5 of 2, an error of 0.25", "biases take 0.1 (5 % of",
                           "BEYOND the tolerance of 0.001"});
  EXPECT_EQ(lines[1], "sparse: came 75 % of the mass of row");
}

TEST(RenderStatistics, IsALineForEachLayer) {
  v1::MapStatistics statistics;
  for (const int layer : {0, 3}) {
    statistics.add_layers(layer);
    statistics.add_first_share(0.125f);
    statistics.add_entropy(1.5f);
  }
  std::ostringstream out;
  RenderStatistics(kPlain, statistics, out);
  ExpectInOrder(out.str(), {"layer", "first token", "0", "0.125", "1.5", "3", "0.125"});
}

TEST(RenderPatches, DrawsTheSquareWithoutTheClassToken) {
  const std::vector<float> values = {0.1f, 0.2f, 9, 0.3f, -0.4f};
  std::ostringstream plain, color;
  EXPECT_TRUE(RenderPatches(kPlain, values, 2, plain));
  ExpectInOrder(plain.str(), {"class token +9", "row  1, column  1        -0.4"});
  EXPECT_EQ(plain.str().find('\x1b'), std::string::npos);
  EXPECT_TRUE(RenderPatches(kColor, values, 2, color));
  EXPECT_TRUE(absl::StrContains(color.str(), "\u2580"));
  EXPECT_FALSE(RenderPatches(kPlain, std::vector<float>(7), 2, plain));
  EXPECT_FALSE(RenderPatches(kPlain, values, 5, plain));
}

TEST(TargetText, SaysWhatIsExplainedAndByWhat) {
  v1::ResolvedTarget target;
  target.set_position(4);
  target.set_token_id(7);
  target.set_piece("\u0120dog");
  target.set_value(1.5f);
  EXPECT_TRUE(absl::StartsWith(TargetText(target, v1::OUTPUT_VALUE_UNSPECIFIED, false),
                               "why \" dog\" (#7) after position 4: logit +1.5, probability 1"));
  target.set_contrast_token_id(9);
  EXPECT_TRUE(absl::StrContains(TargetText(target, v1::OUTPUT_VALUE_LOG_PROBABILITY, false),
                                "rather than #9 after position 4: difference of log-prob"));
  EXPECT_TRUE(absl::StrContains(TargetText(target, v1::OUTPUT_VALUE_LOGIT, true),
                                "(class 7) rather than class 9: difference of logits"));
  target.clear_contrast_token_id();
  target.set_generated(2);
  EXPECT_TRUE(absl::StrContains(TargetText(target, v1::OUTPUT_VALUE_LOGIT, false),
                                "\" dog\" (#7), generated token 2: logit"));
  target.set_generated_end(6);
  EXPECT_TRUE(absl::StartsWith(TargetText(target, v1::OUTPUT_VALUE_LOGIT, false),
                               "why the generated tokens 2 to 5: sum of logits +1.5"));
}

}  // namespace
}  // namespace mambascope::cli
