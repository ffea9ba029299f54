// Calls of classifiers and of image models, from admission to the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/support/serving_bench.h"

namespace mambascope::serving {
namespace {

using testing::HasSubstr;

v1::PredictRequest TokensRequest(const std::string& model) {
  v1::PredictRequest request;
  request.set_model(model);
  for (const int32_t id : {3, 1, 4, 1, 5}) request.mutable_token_ids()->add_ids(id);
  return request;
}

v1::PredictRequest ImageRequest(float value = 0.5f) {
  v1::PredictRequest request;
  request.set_model("vim");
  v1::ImageTensor* tensor = request.mutable_image()->mutable_tensor();
  tensor->set_height(16);
  tensor->set_width(16);
  std::vector<float> values(3 * 16 * 16);
  for (size_t i = 0; i < values.size(); ++i) values[i] = value * static_cast<float>(i % 17);
  tensor->set_values(values.data(), values.size() * sizeof(float));
  return request;
}

std::vector<v1::PredictEvent> Answer(const v1::PredictRequest& request) {
  ServingBench bench;
  const auto sent = bench.Send(request);
  EXPECT_TRUE(sent.refusal.ok()) << sent.refusal;
  bench.Run();
  EXPECT_TRUE(sent.results->final_status().ok()) << sent.results->final_status();
  return ServingBench::Read(*sent.results);
}

std::string Refusal(const v1::PredictRequest& request,
                    absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  ServingBench bench;
  const absl::Status status = bench.Send(request).refusal;
  EXPECT_EQ(status.code(), code) << status;
  return std::string(status.message());
}

TEST(ClassifierCall, AnswersOnceWithItsClassesBestFirst) {
  for (const char* model : {"class", "mean"}) {
    SCOPED_TRACE(model);
    v1::PredictRequest request = TokensRequest(model);
    request.mutable_generation()->set_top_logprobs(2);
    request.mutable_generation()->set_return_logits(true);
    const auto events = Answer(request);
    ASSERT_EQ(events.size(), 4u);
    EXPECT_EQ(events[0].started().tokens_size(), 5);
    EXPECT_EQ(events[0].started().tensors(0).axes(0).name(), "classes");
    const auto& top = events[1].classification().top();
    ASSERT_EQ(top.size(), 2);
    EXPECT_GT(top[0].log_probability(), top[1].log_probability());
    EXPECT_EQ(events[2].tensor_chunk().tensor(), "logits");
    std::vector<float> logits(events[2].tensor_chunk().data().size() / sizeof(float));
    std::memcpy(logits.data(), events[2].tensor_chunk().data().data(),
                logits.size() * sizeof(float));
    EXPECT_EQ(logits[top[0].class_id()], top[0].logit());
    EXPECT_EQ(events[3].finished().finish_reason(), v1::FINISH_REASON_CLASSIFIED);
    EXPECT_EQ(events[3].finished().usage().generated_tokens(), 0);
  }
}

TEST(ClassifierCall, ALongTextIsReadInPiecesAndGivesTheSameClasses) {
  for (const char* model : {"class", "mean"}) {
    v1::PredictRequest request = TokensRequest(model);
    for (int i = 0; i < 300; ++i) request.mutable_token_ids()->add_ids(i % 60);
    std::vector<std::string> answers;
    for (const int32_t tokens : {64, 512}) {
      ExecutorOptions options;
      options.batch.max_batch_tokens = tokens;
      ServingBench bench(options);
      const auto sent = bench.Send(request);
      ASSERT_TRUE(sent.refusal.ok()) << sent.refusal;
      bench.Run();
      answers.push_back(ServingBench::Read(*sent.results)[1].classification().SerializeAsString());
    }
    EXPECT_EQ(answers[0], answers[1]) << model;
  }
}

TEST(ClassifierCall, AnExplanationNamesItsClass) {
  v1::PredictRequest request = TokensRequest("class");
  v1::Explanation* explanation = request.add_explanations();
  explanation->mutable_raw_attention();
  explanation->mutable_target()->set_class_id(2);
  explanation->mutable_target()->set_contrast_class_id(0);
  for (const v1::PredictEvent& event : Answer(request)) {
    if (!event.has_explanation_started()) continue;
    EXPECT_EQ(event.explanation_started().target().token_id(), 2);
    EXPECT_EQ(event.explanation_started().target().contrast_token_id(), 0);
    EXPECT_EQ(event.explanation_started().target().position(), 4);
  }
  explanation->mutable_target()->set_class_id(0);
  EXPECT_THAT(Refusal(request), HasSubstr("the same class 0"));
  explanation->mutable_target()->set_class_id(3);
  EXPECT_THAT(Refusal(request), HasSubstr("class_id: 3 is outside 0 to 2"));
  explanation->mutable_target()->set_token_id(1);
  EXPECT_THAT(Refusal(request), HasSubstr("answers with classes: give class_id"));
  explanation->mutable_target()->set_position(2);
  EXPECT_THAT(Refusal(request), HasSubstr("position: 2 is not 4, where"));
}

TEST(ClassifierCall, WhatWouldBeIgnoredIsRefused) {
  v1::PredictRequest request = TokensRequest("class");
  request.mutable_generation()->set_temperature(1);
  EXPECT_THAT(Refusal(request), HasSubstr("answers with classes"));
}

// Every method of maps, and what it says of itself.
void ExpectExplained(v1::PredictRequest request, int32_t position) {
  request.add_explanations()->mutable_hidden_attention();
  request.add_explanations()->mutable_attention_rollout();
  request.add_explanations()->mutable_raw_attention();
  auto* mixer = request.add_explanations();
  mixer->set_id("mixer");
  mixer->mutable_hidden_attention()->set_scope(v1::HiddenAttention::SCOPE_MIXER);
  request.add_explanations()->mutable_parameters()->add_kinds(v1::Parameters::KIND_STATE);
  int finished = 0, statistics = 0;
  int32_t best = -1;
  for (const v1::PredictEvent& event : Answer(request)) {
    if (event.has_classification()) best = event.classification().top(0).class_id();
    if (event.has_explanation_started()) {
      EXPECT_EQ(event.explanation_started().target().position(), position);
      EXPECT_EQ(event.explanation_started().target().token_id(), best);
    }
    if (!event.has_explanation_finished()) continue;
    const v1::ExplanationFinished& end = event.explanation_finished();
    EXPECT_EQ(end.status().code(), 0) << end.ShortDebugString();
    EXPECT_TRUE(end.quality().within_tolerance()) << end.ShortDebugString();
    ++finished;
    statistics += end.has_statistics() ? 1 : 0;
  }
  EXPECT_EQ(finished, 5);
  EXPECT_EQ(statistics, 2);
}

TEST(ClassifierCall, IsExplainedFromTheRowsThatItReads) {
  ExpectExplained(TokensRequest("class"), 4);
  ExpectExplained(TokensRequest("mean"), 4);
  v1::PredictRequest request = TokensRequest("mean");
  request.add_explanations()->mutable_attention_rollout()->set_variant(v1::VARIANT_CODE);
  EXPECT_THAT(Refusal(request), HasSubstr("attention_rollout.variant: VARIANT_CODE does not go"));
}

TEST(ImageCall, IsExplainedFromItsClassToken) { ExpectExplained(ImageRequest(), 8); }

TEST(ImageCall, ATensorIsClassified) {
  const auto events = Answer(ImageRequest());
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].started().tokens_size(), 0);
  EXPECT_EQ(events[1].classification().top_size(), 5);
  EXPECT_EQ(events[2].finished().usage().prompt_tokens(), 17);
}

TEST(ImageCall, ManyAtOnceAnswerAsEachAlone) {
  ExecutorOptions options;
  options.batch.max_batch_tokens = 40;  // two images a pass
  ServingBench bench(options);
  std::vector<ServingBench::Sent> sent;
  for (int i = 0; i < 5; ++i)
    sent.push_back(bench.Send(ImageRequest(0.1f * static_cast<float>(i))));
  bench.Run();
  for (int i = 0; i < 5; ++i) {
    const auto alone = Answer(ImageRequest(0.1f * static_cast<float>(i)));
    const auto together = ServingBench::Read(*sent[i].results);
    EXPECT_EQ(together[1].classification().SerializeAsString(),
              alone[1].classification().SerializeAsString());
  }
}

TEST(ImageCall, WrongInputsAreNamed) {
  v1::PredictRequest request = ImageRequest();
  request.mutable_image()->mutable_tensor()->set_height(8);
  EXPECT_THAT(Refusal(request),
              HasSubstr("image.tensor: 3 x 8 x 16 is not the model's 3 x 16 x 16"));
  request = ImageRequest();
  request.mutable_image()->mutable_tensor()->mutable_values()->pop_back();
  EXPECT_THAT(Refusal(request), HasSubstr("image.tensor.values: 3071 bytes are not the 3072"));
  request = ImageRequest(INFINITY);
  EXPECT_THAT(Refusal(request), HasSubstr("a value that is not finite"));
  request.mutable_image()->set_encoded("GIF89a");
  EXPECT_THAT(Refusal(request), HasSubstr("image.encoded: "));
  request.clear_image();
  EXPECT_THAT(Refusal(request), HasSubstr("no image is given"));
  request.mutable_image();
  EXPECT_THAT(Refusal(request), HasSubstr("neither encoded nor tensor is given"));
  request.set_text("a cat");
  EXPECT_THAT(Refusal(request), HasSubstr("takes an image only"));
  request = ImageRequest();
  request.set_model("tiny");
  EXPECT_THAT(Refusal(request), HasSubstr("no image"));
  request = ImageRequest();
  request.add_explanations()->mutable_mamba_lrp();
  request.mutable_explanations(0)->mutable_target()->set_position(0);
  EXPECT_THAT(Refusal(request), HasSubstr("where model 'vim' reads its answer"));
}

TEST(ImageCall, IsExplained) {
  v1::PredictRequest request = ImageRequest();
  request.add_explanations()->mutable_mamba_lrp();
  request.add_explanations()->mutable_integrated_gradients();
  int explained = 0;
  for (const v1::PredictEvent& event : Answer(request)) {
    if (!event.has_explanation_finished()) continue;
    EXPECT_EQ(event.explanation_finished().status().code(), 0);
    ++explained;
  }
  EXPECT_EQ(explained, 2);
}

}  // namespace
}  // namespace mambascope::serving
