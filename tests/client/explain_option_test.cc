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

TEST(ExplainOption, ScalarsOfAOneofAreKeysOfWhichOneMayBeGiven) {
  EXPECT_EQ(Parsed("integrated_gradients:steps=32,baseline_token_id=5")
                .integrated_gradients()
                .baseline_token_id(),
            5);
  EXPECT_TRUE(Parsed("integrated_gradients:zero_baseline").integrated_gradients().zero_baseline());
  EXPECT_EQ(Parsed("occlusion:replacement_token_id=0").occlusion().replacement_case(),
            v1::Occlusion::kReplacementTokenId);
  EXPECT_TRUE(absl::StrContains(Refusal("integrated_gradients:zero_baseline,baseline_token_id=5"),
                                "baseline_token_id: does not go with zero_baseline"));
}

TEST(ExplainOption, AMessageOfOneListIsAList) {
  const v1::IntegratedGradients method =
      Parsed("integrated_gradients:baseline_token_ids=5+7-9").integrated_gradients();
  EXPECT_EQ(std::vector<int>(method.baseline_token_ids().ids().begin(),
                             method.baseline_token_ids().ids().end()),
            (std::vector<int>{5, 7, 8, 9}));
}

TEST(ExplainOption, EnumsMayRepeatComeFromOtherMessagesAndStandInEitherCase) {
  const v1::Parameters method =
      Parsed("parameters:kinds=delta+B+state,direction=backward").parameters();
  ASSERT_EQ(method.kinds_size(), 3);
  EXPECT_EQ(method.kinds(1), v1::Parameters::KIND_B);
  EXPECT_EQ(method.direction(), v1::HiddenAttention::DIRECTION_BACKWARD);
  EXPECT_EQ(Parsed("hidden_attention:scope=mixer").hidden_attention().scope(),
            v1::HiddenAttention::SCOPE_MIXER);
  const v1::MambaAttribution attribution =
      Parsed("mamba_attribution:broadcast=output,normalization=row_sum").mamba_attribution();
  EXPECT_EQ(attribution.broadcast(), v1::MambaAttribution::BROADCAST_OUTPUT);
  EXPECT_EQ(attribution.normalization(), v1::AttentionRollout::NORMALIZATION_ROW_SUM);
}

TEST(ExplainOption, GroupsOfTokensAreKeysOfEveryMethod) {
  const v1::Aggregation groups =
      Parsed("occlusion:words,sentences=true,pixels=1,spans=0-5+7-9").aggregation();
  EXPECT_TRUE(groups.words() && groups.sentences() && groups.pixels());
  ASSERT_EQ(groups.spans_size(), 2);
  EXPECT_EQ(groups.spans(0).end(), 6u);  // half-open in the request
  EXPECT_EQ(groups.spans(1).begin(), 7u);
  EXPECT_FALSE(Parsed("occlusion").has_aggregation());
}

TEST(ExplainOption, FaithfulnessIsAskedForByNameByRemovalOrByItsParts) {
  EXPECT_EQ(Parsed("mamba_lrp:faithfulness").faithfulness().removal(),
            v1::Faithfulness::REMOVAL_ZERO);
  const v1::Faithfulness token =
      Parsed("mamba_lrp:faithfulness=token:7,faithfulness_draws=0,faithfulness_shares=0.1+0.5")
          .faithfulness();
  EXPECT_EQ(token.removal(), v1::Faithfulness::REMOVAL_TOKEN);
  EXPECT_EQ(token.token_id(), 7);
  EXPECT_TRUE(token.has_random_draws());
  EXPECT_EQ(token.shares_size(), 2);
  EXPECT_EQ(Parsed("mamba_lrp:faithfulness_points=9").faithfulness().points(), 9);
  EXPECT_TRUE(absl::StrContains(Refusal("mamba_lrp:faithfulness=token"), "zero, delete, token:ID"));
  EXPECT_TRUE(absl::StrContains(Refusal("mamba_lrp:faithfulness_draws=x"),
                                "faithfulness_draws: 'x' is not an integer"));
}

TEST(ExplainOption, EveryMethodTakesATargetOfItsOwn) {
  const v1::Target target = Parsed("mamba_lrp:target=-2:7,contrast=9").target();
  EXPECT_EQ(target.position(), -2);
  EXPECT_EQ(target.token_id(), 7);
  EXPECT_EQ(target.contrast_token_id(), 9);
  EXPECT_EQ(Parsed("mamba_lrp:generated=3-5").target().generated_end(), 6);
  Refusal("mamba_lrp:generated=3,target=-1");
  Refusal("mamba_lrp:target");
  EXPECT_TRUE(absl::StrContains(Refusal("raw_attention:rows=all"), "target, contrast, generated"));
}

}  // namespace
}  // namespace mambascope::cli
