#include "client/cli/target_option.h"

#include <string>

#include <gtest/gtest.h>

#include "absl/strings/match.h"

namespace mambascope::cli {
namespace {

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
  for (const char* option : {"", "x", ":5", "1.5", "3:", "99999999999", "gen:", "gen:x", "gen:-1",
                             "gen:3-1", "gen:0:", "class:x"}) {
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

TEST(TargetOption, IsAGeneratedTokenOrASpanOfThem) {
  EXPECT_EQ(ParsedTarget("gen:2").generated(), 2);
  EXPECT_FALSE(ParsedTarget("gen:2").has_generated_end());
  EXPECT_EQ(ParsedTarget("gen:0-3").generated(), 0);
  EXPECT_EQ(ParsedTarget("gen:0-3").generated_end(), 4);  // half-open in the request
  EXPECT_EQ(ParsedTarget("gen:1: Paris").text(), " Paris");
  EXPECT_FALSE(ParsedTarget("gen:1").has_position());
}

TEST(TargetOption, IsAClass) {
  EXPECT_EQ(ParsedTarget("class:3").class_id(), 3);
  v1::Target target;
  EXPECT_TRUE(ParseContrast("class:0", &target).ok());
  EXPECT_EQ(target.contrast_class_id(), 0);
}

TEST(TargetOption, IsALogitOrALogProbability) {
  v1::Target target;
  EXPECT_TRUE(ParseTargetValue("log_probability", &target).ok());
  EXPECT_EQ(target.value(), v1::OUTPUT_VALUE_LOG_PROBABILITY);
  EXPECT_TRUE(absl::StrContains(ParseTargetValue("p", &target).message(), "logit"));
}

TEST(FillTarget, TakesWhatIsOpen) {
  const v1::Target common = [] {
    v1::Target target = ParsedTarget("-1:7");
    EXPECT_TRUE(ParseContrast("9", &target).ok());
    EXPECT_TRUE(ParseTargetValue("log_probability", &target).ok());
    return target;
  }();
  v1::Target generated = ParsedTarget("gen:2");
  FillTarget(common, &generated);
  EXPECT_FALSE(generated.has_position());
  EXPECT_EQ(generated.output_case(), v1::Target::OUTPUT_NOT_SET);
  EXPECT_EQ(generated.contrast_token_id(), 9);
  EXPECT_EQ(generated.value(), v1::OUTPUT_VALUE_LOG_PROBABILITY);
  v1::Target contrasted;
  EXPECT_TRUE(ParseContrast(" x", &contrasted).ok());
  FillTarget(common, &contrasted);
  EXPECT_EQ(contrasted.position(), -1);
  EXPECT_EQ(contrasted.contrast_text(), " x");
}

}  // namespace
}  // namespace mambascope::cli
