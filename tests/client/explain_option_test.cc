#include "client/cli/explain_option.h"

#include <string>

#include <gtest/gtest.h>

#include "absl/strings/match.h"

namespace mambascope::cli {
namespace {

v1::Explanation Parsed(const std::string& option) {
  const auto explanation = ParseExplain(option);
  EXPECT_TRUE(explanation.ok()) << explanation.status();
  return explanation.ok() ? *explanation : v1::Explanation();
}

std::string Refusal(const std::string& option) {
  const auto explanation = ParseExplain(option);
  EXPECT_EQ(explanation.status().code(), absl::StatusCode::kInvalidArgument) << option;
  return std::string(explanation.status().message());
}

TEST(ExplainOption, AMethodAloneLeavesEveryFieldToTheServer) {
  const v1::Explanation explanation = Parsed("attention_rollout");
  EXPECT_TRUE(explanation.has_attention_rollout());
  EXPECT_EQ(explanation.attention_rollout().ByteSizeLong(), 0);
  EXPECT_EQ(explanation.id(), "");
}

TEST(ExplainOption, EveryMethodOfTheProtoCanBeAskedFor) {
  const auto* methods = v1::Explanation::descriptor()->FindOneofByName("method");
  for (int i = 0; i < methods->field_count(); ++i) {
    const v1::Explanation explanation = Parsed(methods->field(i)->name());
    EXPECT_TRUE(explanation.GetReflection()->HasField(explanation, methods->field(i)));
    EXPECT_TRUE(absl::StrContains(ExplainHelp(), methods->field(i)->name()));
  }
}

TEST(ExplainOption, KeysAreTheFieldsOfTheMethodAndTheId) {
  const v1::Explanation explanation =
      Parsed("hidden_attention:id=map,reduction=top_k,top_k=3,rows=target,part=relu");
  EXPECT_EQ(explanation.id(), "map");
  EXPECT_EQ(explanation.hidden_attention().reduction(), v1::REDUCTION_TOP_K);
  EXPECT_EQ(explanation.hidden_attention().top_k(), 3);
  EXPECT_EQ(explanation.hidden_attention().rows(), v1::ROWS_TARGET);
  EXPECT_EQ(explanation.hidden_attention().part(), v1::PART_RELU);
}

TEST(ExplainOption, EnumsInsideAMethodLoseTheirPrefixToo) {
  EXPECT_EQ(Parsed("attention_rollout:normalization=row_sum").attention_rollout().normalization(),
            v1::AttentionRollout::NORMALIZATION_ROW_SUM);
  EXPECT_EQ(Parsed("raw_attention:variant=code_quirks").raw_attention().variant(),
            v1::VARIANT_CODE_QUIRKS);
}

TEST(ExplainOption, RangesAreInclusiveHereAndHalfOpenInTheRequest) {
  const v1::HiddenAttention method = Parsed("hidden_attention:layers=0-3+5").hidden_attention();
  ASSERT_EQ(method.layers_size(), 2);
  EXPECT_EQ(method.layers(0).begin(), 0);
  EXPECT_EQ(method.layers(0).end(), 4);
  EXPECT_EQ(method.layers(1).begin(), 5);
  EXPECT_EQ(method.layers(1).end(), 6);
}

TEST(ExplainOption, ListsOfIntegersJoinNumbersAndRanges) {
  const v1::HiddenAttention method =
      Parsed("hidden_attention:channels=7+1-3,states=0").hidden_attention();
  EXPECT_EQ(std::vector<int>(method.channels().begin(), method.channels().end()),
            (std::vector<int>{7, 1, 2, 3}));
  EXPECT_EQ(method.states_size(), 1);
}

TEST(ExplainOption, NegativeNumbersAreNumbersForTheServerToRefuse) {
  EXPECT_EQ(Parsed("raw_attention:start_layer=-1").raw_attention().start_layer(), -1);
}

TEST(ExplainOption, AnUnknownMethodIsRefusedWithThoseThatExist) {
  const std::string refusal = Refusal("hiden_attention");
  EXPECT_TRUE(absl::StrContains(refusal, "'hiden_attention'")) << refusal;
  EXPECT_TRUE(absl::StrContains(refusal, "hidden_attention, raw_attention")) << refusal;
}

TEST(ExplainOption, AnUnknownKeyIsRefusedWithThoseOfTheMethod) {
  const std::string refusal = Refusal("raw_attention:rows=all");
  EXPECT_TRUE(absl::StrContains(refusal, "no option 'rows'")) << refusal;
  EXPECT_TRUE(absl::StrContains(refusal, "id, reduction, start_layer, variant")) << refusal;
}

TEST(ExplainOption, AnUnknownValueIsRefusedWithThoseOfTheField) {
  const std::string refusal = Refusal("hidden_attention:reduction=average");
  EXPECT_TRUE(absl::StrContains(refusal, "mean, abs_mean, top_k, channels")) << refusal;
  // "Whatever the default is" is said by leaving the key out.
  EXPECT_FALSE(absl::StrContains(refusal, "unspecified")) << refusal;
  Refusal("hidden_attention:reduction=unspecified");
  Refusal("hidden_attention:reduction=REDUCTION_MEAN");
}

TEST(ExplainOption, MalformedOptionsAreRefused) {
  for (const char* option : {"",
                             ":",
                             "raw_attention:",
                             "raw_attention:top_k",
                             "raw_attention:=3",
                             "raw_attention:top_k=",
                             "raw_attention:top_k=1,",
                             "raw_attention:top_k=1,top_k=2",
                             "raw_attention:top_k=1+2",
                             "raw_attention:top_k=1-2",
                             "raw_attention:top_k=4294967296",
                             "raw_attention:top_k=1.5",
                             "hidden_attention:layers=3-1",
                             "hidden_attention:layers=-2--1",
                             "hidden_attention:layers=",
                             "hidden_attention:layers=0-2147483647",
                             "hidden_attention:channels=1++2",
                             "hidden_attention:channels=1-",
                             "hidden_attention:channels=-",
                             "hidden_attention:channels=99999999999999999999"}) {
    SCOPED_TRACE(option);
    Refusal(option);
  }
}

TEST(ExplainOption, AShortTextCannotMakeAnEndlessList) {
  Refusal("hidden_attention:channels=0-2147483647");
  Refusal("hidden_attention:channels=-9223372036854775808-9223372036854775807");
  Refusal("hidden_attention:channels=0-65535+1");
  EXPECT_EQ(Parsed("hidden_attention:channels=0-65535").hidden_attention().channels_size(), 65536);
}

v1::Target ParsedTarget(const std::string& option) {
  v1::Target target;
  EXPECT_TRUE(ParseTarget(option, &target).ok());
  return target;
}

TEST(TargetOption, IsAPositionAloneOrWithAToken) {
  EXPECT_EQ(ParsedTarget("-1").position(), -1);
  EXPECT_EQ(ParsedTarget("-1").output_case(), v1::Target::OUTPUT_NOT_SET);
  EXPECT_EQ(ParsedTarget("4:1127").token_id(), 1127);
  EXPECT_EQ(ParsedTarget("0: Paris").text(), " Paris");
  EXPECT_TRUE(ParsedTarget("0:7").has_position());
}

TEST(TargetOption, ATextMayHoldColonsAndDigits) {
  EXPECT_EQ(ParsedTarget("2::").text(), ":");
  EXPECT_EQ(ParsedTarget("2:12th").text(), "12th");
}

TEST(TargetOption, RefusesWhatIsNoPositionAndTokensWithoutText) {
  v1::Target target;
  for (const char* option : {"", "x", ":5", "1.5", "3:", "99999999999"}) {
    EXPECT_EQ(ParseTarget(option, &target).code(), absl::StatusCode::kInvalidArgument) << option;
  }
}

TEST(ContrastOption, IsAnIdOrAText) {
  v1::Target target;
  EXPECT_TRUE(ParseContrast("17", &target).ok());
  EXPECT_EQ(target.contrast_token_id(), 17);
  EXPECT_TRUE(ParseContrast(" London", &target).ok());
  EXPECT_EQ(target.contrast_text(), " London");
  EXPECT_FALSE(ParseContrast("", &target).ok());
}

}  // namespace
}  // namespace mambascope::cli
