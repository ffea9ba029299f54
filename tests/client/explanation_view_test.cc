#include "client/cli/explanation_view.h"

#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/match.h"

namespace mambascope::cli {
namespace {

struct Named {
  std::string name;
  std::vector<float> values;
};

std::string Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// An explanation "x" of `method` over two tokens, whose tensors are rows over the input tokens.
ExplanationAnswer Explained(const std::string& method, const std::vector<Named>& tensors) {
  ExplanationAnswer answer;
  answer.started.set_explanation_id("x");
  answer.started.set_method(method);
  answer.started.mutable_target()->set_position(1);
  for (const Named& tensor : tensors) {
    auto* info = answer.started.add_tensors();
    info->set_name(tensor.name);
    info->set_dtype(v1::DATA_TYPE_FP32);
    info->set_total_bytes(static_cast<int64_t>(tensor.values.size() * sizeof(float)));
    info->add_axes()->set_name(tensor.values.size() == 1 ? "value" : "input_tokens");
    info->mutable_axes(0)->set_size(static_cast<int64_t>(tensor.values.size()));
  }
  EXPECT_TRUE(answer.tensors.Announce(answer.started.tensors(), true).ok());
  for (const Named& tensor : tensors) {
    v1::TensorChunk chunk;
    chunk.set_tensor(tensor.name);
    chunk.set_data(Bytes(tensor.values));
    EXPECT_TRUE(answer.tensors.Append(chunk).ok());
  }
  answer.finished = true;
  return answer;
}

std::string Text(const ExplanationAnswer& answer) {
  const v1::PredictRequest request;
  const std::vector<TokenLabel> tokens = {
      {"The", false, 0}, {" cat", false, 1}, {" sat", false, 2}};
  const PieceNames pieces;
  std::ostringstream out;
  RenderExplanation(Screen(), answer, {request, tokens, 2, pieces, false}, out);
  return out.str();
}

TEST(ExplanationView, AttributionIsShownWithoutItsIdentityPathAndSaysSo) {
  const std::string text =
      Text(Explained("mamba_attribution",
                     {{"mamba_attribution", {0.25f, 1.75f}}, {"without_self", {0.25f, 0.75f}}}));
  EXPECT_TRUE(absl::StrContains(text, "not shown: nearly all of it is")) << text;
  EXPECT_FALSE(absl::StrContains(text, "+1.75")) << text;
  EXPECT_TRUE(absl::StrContains(text, "\u2423cat        +0.75")) << text;
}

TEST(ExplanationView, SmallPartsStandBesideTheirNames) {
  const std::string text =
      Text(Explained("latim", {{"latim", {1, 2}}, {"embedding", {0.5f}}, {"other", {3, 4}}}));
  EXPECT_TRUE(absl::StrContains(text, "embedding [1 value]  +0.5\n")) << text;
  EXPECT_TRUE(absl::StrContains(text, "other [2 input_tokens]\n")) << text;
  EXPECT_FALSE(absl::StrContains(text, "+4")) << text;
}

TEST(ExplanationView, CurvesAreCountedNotListed) {
  const std::string text = Text(Explained("occlusion", {{"occlusion", {1, 2}},
                                                        {"faithfulness/deletion_most", {1, 2}},
                                                        {"faithfulness/deletion_least", {1, 2}}}));
  EXPECT_TRUE(absl::StrContains(text, "faithfulness/... 2 curves")) << text;
  EXPECT_FALSE(absl::StrContains(text, "deletion_most")) << text;
}

TEST(ExplanationView, AGeneratedTargetHasWhatWasGeneratedBeforeItAsInput) {
  ExplanationAnswer answer = Explained("occlusion", {{"occlusion", {1, 2, -3}}});
  answer.started.mutable_target()->set_position(2);
  answer.started.mutable_target()->set_generated(1);
  EXPECT_TRUE(absl::StrContains(Text(answer), "\u2423sat           -3")) << Text(answer);
}

TEST(ExplanationView, AFailureIsAllThereIs) {
  ExplanationAnswer answer = Explained("occlusion", {{"occlusion", {1, 2}}});
  answer.end.mutable_status()->set_code(13);
  answer.end.mutable_status()->set_message("not finite");
  EXPECT_TRUE(absl::StrContains(Text(answer), "failed: INTERNAL: not finite\n"));
  EXPECT_FALSE(absl::StrContains(Text(answer), "+2"));
}

}  // namespace
}  // namespace mambascope::cli
