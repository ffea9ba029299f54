#include "server/serving/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "google/rpc/error_details.pb.h"
#include "tests/support/serving_bench.h"

namespace mambascope::serving {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::SizeIs;
using testing::UnorderedElementsAre;

std::vector<std::string> Fields(const absl::Status& status) {
  std::vector<std::string> fields;
  const auto payload = status.GetPayload("type.googleapis.com/google.rpc.BadRequest");
  google::rpc::BadRequest bad;
  if (payload.has_value() && bad.ParseFromString(std::string(*payload))) {
    for (const auto& violation : bad.field_violations()) fields.push_back(violation.field());
  }
  return fields;
}

std::vector<std::string> RefusedFields(v1::PredictRequest request) {
  ServingBench bench;
  const absl::Status status = bench.Send(std::move(request)).refusal;
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return Fields(status);
}

TEST(Admission, TakesAGoodRequest) {
  ServingBench bench;
  EXPECT_TRUE(bench.Send(AtlasRequest("The capital of France is")).refusal.ok());
}

TEST(Admission, AnUnknownModelNamesThoseThatExist) {
  ServingBench bench;
  v1::PredictRequest request = AtlasRequest("x");
  for (const char* name : {"", "nope", "atlas@7", "@", "atlas@"}) {
    request.set_model(name);
    const absl::Status status = bench.Send(request).refusal;
    EXPECT_TRUE(absl::IsNotFound(status)) << name;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("atlas@1, class@1, heads@1, mean@1, tiny@1, vim@1"));
  }
}

TEST(Admission, EachBadFieldIsNamed) {
  EXPECT_THAT(RefusedFields(AtlasRequest("")), UnorderedElementsAre("text"));
  EXPECT_THAT(RefusedFields(AtlasRequest(std::string(10 << 20, 'a'))),
              UnorderedElementsAre("text"));
  EXPECT_THAT(RefusedFields(TinyRequest({})), UnorderedElementsAre("token_ids"));
  EXPECT_THAT(RefusedFields(TinyRequest({1, -1, 101})),
              UnorderedElementsAre("token_ids.ids[1]", "token_ids.ids[2]"));
  v1::PredictRequest no_input = AtlasRequest("x");
  no_input.clear_input();
  EXPECT_THAT(RefusedFields(no_input), UnorderedElementsAre("input"));
  v1::PredictRequest text_without_tokenizer = AtlasRequest("x");
  text_without_tokenizer.set_model("tiny");
  EXPECT_THAT(RefusedFields(text_without_tokenizer), UnorderedElementsAre("text"));
  for (int max_tokens : {0, -1, 1'000'000'000}) {
    EXPECT_THAT(RefusedFields(TinyRequest({1}, max_tokens)),
                UnorderedElementsAre("generation.max_tokens"));
  }
  for (float temperature :
       {-1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    v1::PredictRequest request = TinyRequest({1});
    request.mutable_generation()->set_temperature(temperature);
    EXPECT_THAT(RefusedFields(request), UnorderedElementsAre("generation.temperature"));
  }
}

TEST(Admission, AllViolationsComeAtOnce) {
  v1::PredictRequest request = AtlasRequest("The capital of France is", -5);
  request.set_request_id("two\nlines");
  v1::Generation* generation = request.mutable_generation();
  generation->set_temperature(std::numeric_limits<float>::quiet_NaN());
  generation->set_top_p(1.5f);
  generation->set_top_k(-2);
  generation->set_top_logprobs(65);
  generation->add_stop("");
  request.mutable_delivery()->set_max_chunk_bytes(10);
  request.mutable_delivery()->set_dtype(v1::DATA_TYPE_INT32);
  (*request.mutable_labels())[std::string(65, 'k')] = "v";
  v1::Explanation* first = request.add_explanations();
  first->set_id("same");
  first->mutable_raw_attention()->set_start_layer(99);
  v1::Explanation* second = request.add_explanations();
  second->set_id("same");
  second->mutable_raw_attention();
  second->mutable_target()->set_position(500);
  request.add_explanations()->set_id("no method");
  EXPECT_THAT(RefusedFields(request),
              UnorderedElementsAre(
                  "request_id", "generation.max_tokens", "generation.temperature",
                  "generation.top_p", "generation.top_k", "generation.top_logprobs",
                  "generation.stop[0]", "delivery.max_chunk_bytes", "delivery.dtype", "labels",
                  "explanations[0].raw_attention.start_layer", "explanations[1].id",
                  "explanations[1].target.position", "explanations[2].method"));
}

TEST(Admission, AThousandWrongIdsAreNamedInBounds) {
  EXPECT_THAT(RefusedFields(TinyRequest(std::vector<int32_t>(1000, -1))), SizeIs(11));
}

TEST(Admission, AMillionBadEntriesCostNoMoreThanAFew) {
  v1::PredictRequest request = AtlasRequest("x");
  for (int i = 0; i < 1'000'000; ++i) request.mutable_generation()->add_stop("");
  EXPECT_THAT(RefusedFields(request), SizeIs(testing::Le(9)));
  v1::PredictRequest labels = AtlasRequest("x");
  for (int i = 0; i < 10'000; ++i) {
    (*labels.mutable_labels())[std::to_string(i) + std::string(70, 'k')] = "v";
  }
  EXPECT_THAT(RefusedFields(labels), SizeIs(testing::Le(17)));
}

TEST(Admission, ATargetTextIsExactlyOneToken) {
  v1::PredictRequest request = AtlasRequest("The capital of France is");
  v1::Target* target = request.add_explanations()->mutable_target();
  request.mutable_explanations(0)->mutable_raw_attention();
  target->set_text(" Paris and more");
  EXPECT_THAT(RefusedFields(request), UnorderedElementsAre("explanations[0].target.text"));
  target->set_text(" Paris");
  target->set_contrast_text(" Paris");
  EXPECT_THAT(RefusedFields(request), UnorderedElementsAre("explanations[0].target"));
  target->set_token_id(5000);
  target->set_contrast_token_id(-3);
  EXPECT_THAT(RefusedFields(request),
              UnorderedElementsAre("explanations[0].target.token_id",
                                   "explanations[0].target.contrast_token_id"));
}

TEST(Admission, AnInputBeyondTheLimitIsRefusedWithBothNumbers) {
  ServingBench bench({}, {.max_input_tokens = 4});
  const absl::Status status = bench.Send(TinyRequest({1, 2, 3, 4, 5})).refusal;
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("5 tokens exceed model 'tiny' limit 4"));
}

TEST(Admission, WhatCouldNeverFitTheBudgetIsRefusedForGood) {
  ServingBench bench({}, {}, /*budget_bytes=*/1000);
  v1::PredictRequest request = TinyRequest({1, 2, 3});
  request.add_explanations()->mutable_hidden_attention();
  const absl::Status status = bench.Send(request).refusal;
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("budget of 1000"));
}

TEST(Admission, WhatDoesNotFitNowIsRefusedWithATimeToRetryAndFitsLater) {
  v1::PredictRequest request = TinyRequest(std::vector<int32_t>(100, 1));
  request.add_explanations()->mutable_hidden_attention();
  ServingBench probe;
  const auto first = probe.Send(request);
  ASSERT_TRUE(first.refusal.ok());
  const int64_t needed = ServingBench::Read(*first.results)[0].started().estimate().memory_bytes();

  ServingBench bench({}, {}, needed + needed / 2);
  ASSERT_TRUE(bench.Send(request).refusal.ok());
  const absl::Status status = bench.Send(request).refusal;
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_TRUE(status.GetPayload("type.googleapis.com/google.rpc.RetryInfo").has_value());
  bench.Run();
  EXPECT_TRUE(bench.Send(request).refusal.ok()) << "the first call's memory is back";
}

TEST(Admission, TokenizeGivesPiecesAndSpans) {
  ServingBench bench;
  v1::TokenizeRequest request;
  request.set_model("atlas");
  request.set_text("The capital of France is");
  std::string model_name;
  const auto response = bench.admission.Tokenize(request, &model_name);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_TRUE(response->tokens(0).special());
  EXPECT_EQ(response->tokens(1).piece(), "The");
  EXPECT_EQ(response->tokens(response->tokens_size() - 1).end_byte(), request.text().size());
  request.set_model("tiny");
  EXPECT_TRUE(absl::IsInvalidArgument(bench.admission.Tokenize(request, &model_name).status()));
}

}  // namespace
}  // namespace mambascope::serving
