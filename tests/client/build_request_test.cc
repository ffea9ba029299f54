#include "client/cli/build_request.h"

#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "absl/strings/match.h"

namespace mambascope::cli {
namespace {

PredictFlags TextFlags() {
  PredictFlags flags;
  flags.text = "The cat";
  return flags;
}

TEST(BuildRequest, SetsOnlyWhatWasGiven) {
  const auto request = BuildRequest(TextFlags());
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->text(), "The cat");
  EXPECT_FALSE(request->has_generation());
  EXPECT_FALSE(request->has_delivery());
}

TEST(BuildRequest, TakesEveryFlag) {
  PredictFlags flags;
  flags.tokens = "5,6";
  flags.explain = {"hidden_attention:id=a", "raw_attention"};
  flags.target = "-2: x";
  flags.contrast = "9";
  flags.max_tokens = 3;
  flags.seed = 1ull << 63;
  flags.stop = {".", "\n"};
  flags.logits = true;
  flags.delivery = "fp16";
  flags.sparse = "mass:0.5";
  flags.labels = {"team=a=b"};
  const auto request = BuildRequest(flags);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->token_ids().ids(1), 6);
  EXPECT_EQ(request->generation().max_tokens(), 3);
  EXPECT_EQ(request->generation().seed(), 1ull << 63);
  EXPECT_EQ(request->generation().stop_size(), 2);
  EXPECT_TRUE(request->generation().return_logits());
  EXPECT_EQ(request->delivery().dtype(), v1::DATA_TYPE_FP16);
  EXPECT_EQ(request->delivery().sparse_mass(), 0.5f);
  EXPECT_EQ(request->labels().at("team"), "a=b");
  ASSERT_EQ(request->explanations_size(), 2);
  for (const v1::Explanation& explanation : request->explanations()) {
    EXPECT_EQ(explanation.target().position(), -2);
    EXPECT_EQ(explanation.target().text(), " x");
    EXPECT_EQ(explanation.target().contrast_token_id(), 9);
  }
}

TEST(BuildRequest, RefusesWhatMakesNoRequest) {
  const auto refuses = [](const std::function<void(PredictFlags*)>& change) {
    PredictFlags flags = TextFlags();
    change(&flags);
    return BuildRequest(flags).status().code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refuses([](PredictFlags* flags) { flags->text.reset(); }));
  EXPECT_TRUE(refuses([](PredictFlags* flags) { flags->tokens = "1"; }));
  EXPECT_TRUE(refuses([](PredictFlags* flags) { flags->text.reset(), flags->tokens = "1,,2"; }));
  EXPECT_TRUE(refuses([](PredictFlags* flags) { flags->explain = {"nothing"}; }));
  EXPECT_TRUE(refuses([](PredictFlags* flags) { flags->target = "-1"; }));
  EXPECT_TRUE(refuses([](PredictFlags* flags) { flags->delivery = "fp64"; }));
  for (const char* sparse : {"top_k", "top_k:x", "mass:", "most:3"}) {
    EXPECT_TRUE(refuses([&](PredictFlags* flags) { flags->sparse = sparse; })) << sparse;
  }
  EXPECT_TRUE(refuses([](PredictFlags* flags) { flags->labels = {"a"}; }));
  EXPECT_TRUE(refuses([](PredictFlags* flags) { flags->labels = {"a=1", "a=2"}; }));
}

TEST(BuildRequest, FaithfulnessGoesToEveryExplanationOfOneScoreAToken) {
  PredictFlags flags = TextFlags();
  flags.explain = {"hidden_attention",
                   "mamba_lrp",
                   "occlusion:faithfulness=delete",
                   "latim",
                   "latim:id=norms,norm=l2",
                   "raw_attention:id=code,variant=code",
                   "gradient_x_input:rows=all"};
  flags.faithfulness = "token:7";
  flags.faithfulness_draws = "3";
  const auto request = BuildRequest(flags);
  ASSERT_TRUE(request.ok()) << request.status();
  const auto faithfulness = [&](int i) { return request->explanations(i).faithfulness(); };
  for (const int without : {0, 4, 5, 6}) {
    EXPECT_FALSE(request->explanations(without).has_faithfulness()) << without;
  }
  EXPECT_EQ(faithfulness(1).token_id(), 7);
  EXPECT_EQ(faithfulness(3).removal(), v1::Faithfulness::REMOVAL_TOKEN);
  EXPECT_EQ(faithfulness(2).removal(), v1::Faithfulness::REMOVAL_DELETE);
  EXPECT_EQ(faithfulness(2).token_id(), 0);
  EXPECT_EQ(faithfulness(2).random_draws(), 3);
}

TEST(BuildRequest, FaithfulnessOfNothingIsRefused) {
  PredictFlags flags = TextFlags();
  flags.explain = {"logit_lens"};
  flags.faithfulness = "zero";
  const auto request = BuildRequest(flags);
  EXPECT_TRUE(absl::StrContains(request.status().message(), "mamba_lrp")) << request.status();
}

TEST(BuildRequest, AnExplanationsOwnTargetPrevails) {
  PredictFlags flags = TextFlags();
  flags.explain = {"mamba_lrp:generated=1", "occlusion"};
  flags.target = "-1:5";
  flags.target_value = "log_probability";
  const auto request = BuildRequest(flags);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_FALSE(request->explanations(0).target().has_position());
  EXPECT_EQ(request->explanations(0).target().value(), v1::OUTPUT_VALUE_LOG_PROBABILITY);
  EXPECT_EQ(request->explanations(1).target().token_id(), 5);
}

}  // namespace
}  // namespace mambascope::cli
