// Calls that also ask how far the model agrees with their scores, from admission to the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "tests/support/serving_bench.h"

namespace mambascope::serving {
namespace {

using testing::HasSubstr;

v1::PredictRequest Request(const std::string& model) {
  v1::PredictRequest request;
  request.set_model(model);
  if (model == "vim") {
    v1::ImageTensor* tensor = request.mutable_image()->mutable_tensor();
    tensor->set_height(16);
    tensor->set_width(16);
    std::vector<float> values(3 * 16 * 16);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.05f * static_cast<float>(i % 17);
    tensor->set_values(values.data(), values.size() * sizeof(float));
  } else {
    for (const int32_t id : {3, 1, 4, 1, 5, 9}) request.mutable_token_ids()->add_ids(id);
  }
  return request;
}

// What came of the one explanation, with its tensors put together.
struct Answer {
  v1::ExplanationStarted started;
  v1::ExplanationFinished finished;
  std::map<std::string, std::string> bytes;
  int32_t last_done = 0, total = 0;

  std::vector<float> floats(const std::string& tensor) const {
    std::vector<float> values(bytes.at(tensor).size() / sizeof(float));
    std::memcpy(values.data(), bytes.at(tensor).data(), bytes.at(tensor).size());
    return values;
  }
};

Answer Ask(const v1::PredictRequest& request) {
  ServingBench bench;
  const auto sent = bench.Send(request);
  EXPECT_TRUE(sent.refusal.ok()) << sent.refusal;
  bench.Run();
  EXPECT_TRUE(sent.results->final_status().ok()) << sent.results->final_status();
  Answer answer;
  for (const v1::PredictEvent& event : ServingBench::Read(*sent.results)) {
    if (event.has_explanation_started()) answer.started = event.explanation_started();
    if (event.has_explanation_finished()) answer.finished = event.explanation_finished();
    if (event.has_tensor_chunk()) {
      answer.bytes[event.tensor_chunk().tensor()] += event.tensor_chunk().data();
    }
    if (event.has_progress()) {
      EXPECT_EQ(event.progress().done(), answer.last_done + 1);
      answer.last_done = event.progress().done();
      answer.total = event.progress().total();
    }
  }
  return answer;
}

std::vector<std::string> RefusedFields(const v1::PredictRequest& request) {
  ServingBench bench;
  const absl::Status status = bench.Send(request).refusal;
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  std::vector<std::string> fields;
  google::rpc::BadRequest bad;
  const auto payload = status.GetPayload("type.googleapis.com/google.rpc.BadRequest");
  if (payload.has_value() && bad.ParseFromString(std::string(*payload))) {
    for (const auto& violation : bad.field_violations()) fields.push_back(violation.field());
  }
  return fields;
}

TEST(FaithfulnessCall, ComesAfterTheScoresOfEveryKindOfModel) {
  for (const char* model : {"tiny", "heads", "class", "mean", "vim"}) {
    SCOPED_TRACE(model);
    v1::PredictRequest request = Request(model);
    v1::Explanation* explanation = request.add_explanations();
    explanation->mutable_occlusion();
    const Answer plain = Ask(request);
    explanation->mutable_faithfulness()->set_random_draws(3);
    const Answer answer = Ask(request);
    EXPECT_EQ(answer.finished.status().code(), 0) << answer.finished.ShortDebugString();
    EXPECT_TRUE(answer.finished.quality().within_tolerance());
    EXPECT_EQ(answer.started.tensors_size(), plain.started.tensors_size() + 8);
    EXPECT_EQ(answer.finished.digests_size(), answer.started.tensors_size());
    EXPECT_EQ(answer.last_done + 1, answer.total);
    for (const auto& [tensor, bytes] : plain.bytes) EXPECT_EQ(answer.bytes.at(tensor), bytes);
    EXPECT_FALSE(plain.finished.has_faithfulness());

    const v1::FaithfulnessReport& report = answer.finished.faithfulness();
    const auto deletion = answer.floats("faithfulness/deletion_most");
    const auto read = static_cast<int32_t>(plain.floats("occlusion").size());
    EXPECT_EQ(report.candidates(), std::string(model) == "mean" ? read : read - 1);
    EXPECT_EQ(static_cast<int32_t>(deletion.size()), report.candidates() + 1);
    EXPECT_NEAR(deletion.front(), std::exp(answer.started.target().log_probability()), 1e-6);
    EXPECT_EQ(deletion.front(), static_cast<float>(report.probability()));
    EXPECT_GT(report.evaluations(), report.candidates());
    EXPECT_TRUE(report.deletion_most_auc().has_random_low());
    EXPECT_EQ(answer.bytes.at("faithfulness/insertion_most_hit").size(), 4 * deletion.size());
  }
}

TEST(FaithfulnessCall, OtherMethodsScoresAreCheckedToo) {
  v1::PredictRequest request = Request("tiny");
  v1::Explanation* explanation = request.add_explanations();
  explanation->mutable_raw_attention();
  explanation->mutable_faithfulness()->set_removal(v1::Faithfulness::REMOVAL_DELETE);
  request.mutable_delivery()->set_dtype(v1::DATA_TYPE_FP16);
  const Answer answer = Ask(request);
  EXPECT_EQ(answer.finished.status().code(), 0) << answer.finished.ShortDebugString();
  EXPECT_EQ(answer.finished.faithfulness().candidates(), 5);
  EXPECT_EQ(answer.bytes.at("faithfulness/deletion_most").size(), 6 * 2u);
  EXPECT_EQ(answer.bytes.at("faithfulness/deletion_most_hit").size(), 6 * 4u);
}

TEST(FaithfulnessCall, ItsCostIsInTheEstimate) {
  v1::PredictRequest request = Request("tiny");
  request.add_explanations()->mutable_occlusion();
  ServingBench bench;
  std::string model_name;
  const auto estimate = [&] {
    const auto call = bench.admission.Admit(request, bench.clock.Now(), absl::InfiniteFuture(),
                                            "id", nullptr, &model_name);
    EXPECT_TRUE(call.ok());
    return std::pair((*call)->explanations[0].plan, (*call)->started.estimate());
  };
  const auto [plain, plain_estimate] = estimate();
  request.mutable_explanations(0)->mutable_faithfulness();
  const auto [checked, checked_estimate] = estimate();
  EXPECT_GT(checked.work.forward_tokens, 3 * plain.work.forward_tokens);
  EXPECT_GT(checked.slices, plain.slices);
  EXPECT_GE(checked_estimate.memory_bytes(), plain_estimate.memory_bytes());
  EXPECT_EQ(checked_estimate.result_bytes(), plain_estimate.result_bytes() + 8 * 6 * 4);
}

TEST(FaithfulnessCall, WhatIsNotOneScoreATokenIsRefused) {
  for (const auto change :
       {+[](v1::Explanation* e) { e->mutable_hidden_attention(); },
        +[](v1::Explanation* e) { e->mutable_attention_rollout()->set_rows(v1::ROWS_ALL); },
        +[](v1::Explanation* e) { e->mutable_raw_attention()->set_variant(v1::VARIANT_CODE); }}) {
    v1::PredictRequest request = Request("tiny");
    v1::Explanation* explanation = request.add_explanations();
    change(explanation);
    explanation->mutable_faithfulness();
    EXPECT_THAT(RefusedFields(request), testing::ElementsAre("explanations[0].faithfulness"));
  }
  v1::PredictRequest request = Request("tiny");
  v1::Explanation* explanation = request.add_explanations();
  explanation->mutable_occlusion();
  explanation->mutable_faithfulness()->set_points(1);
  explanation->mutable_faithfulness()->set_token_id(3);
  EXPECT_THAT(RefusedFields(request),
              testing::UnorderedElementsAre("explanations[0].faithfulness.points",
                                            "explanations[0].faithfulness.token_id"));
}

}  // namespace
}  // namespace mambascope::serving
