// Calls that want their results smaller, summed or compared, from admission to the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "server/explain/upsample.h"
#include "tests/support/decoded_tensor.h"
#include "tests/support/serving_bench.h"

namespace mambascope::serving {
namespace {

using ::mambascope::testing::DecodedTensor;
using ::mambascope::testing::DecodeTensor;
using ::testing::ElementsAre;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

struct Answer {
  v1::Started started;
  std::map<std::string, v1::TensorInfo> infos;  // by "explanation/tensor"
  std::map<std::string, std::string> bytes;
  std::map<std::string, v1::ExplanationFinished> explanations;
  v1::Finished finished;

  DecodedTensor Decoded(const std::string& tensor) const {
    return DecodeTensor(infos.at(tensor), bytes.at(tensor));
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
    if (event.has_started()) answer.started = event.started();
    if (event.has_finished()) answer.finished = event.finished();
    if (event.has_tensor_chunk()) {
      const v1::TensorChunk& chunk = event.tensor_chunk();
      answer.bytes[chunk.explanation_id() + "/" + chunk.tensor()] += chunk.data();
    }
    if (event.has_explanation_started()) {
      for (const v1::TensorInfo& info : event.explanation_started().tensors()) {
        answer.infos[event.explanation_started().explanation_id() + "/" + info.name()] = info;
      }
    }
    if (event.has_explanation_finished()) {
      answer.explanations[event.explanation_finished().explanation_id()] =
          event.explanation_finished();
      EXPECT_EQ(event.explanation_finished().status().code(), 0)
          << event.explanation_finished().status().message();
    }
  }
  return answer;
}

std::vector<std::string> RefusedFields(const v1::PredictRequest& request) {
  ServingBench bench;
  const absl::Status status = bench.Send(request).refusal;
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  google::rpc::BadRequest bad;
  const auto payload = status.GetPayload("type.googleapis.com/google.rpc.BadRequest");
  if (payload.has_value()) {
    EXPECT_TRUE(bad.ParseFromString(std::string(*payload)));
  }
  std::vector<std::string> fields;
  for (const auto& violation : bad.field_violations()) fields.push_back(violation.field());
  return fields;
}

constexpr char kText[] = "The capital of France is Paris. It's big.";
constexpr char kMaps[] = "hidden_attention/hidden_attention";

v1::PredictRequest MapsRequest() {
  v1::PredictRequest request = AtlasRequest(kText);
  request.add_explanations()->mutable_hidden_attention();
  return request;
}

TEST(DeliveryCall, Uint8IsWithinHalfAStepOfTheMaps) {
  v1::PredictRequest request = MapsRequest();
  const DecodedTensor whole = Ask(request).Decoded(kMaps);
  request.mutable_delivery()->set_dtype(v1::DATA_TYPE_UINT8);
  request.mutable_delivery()->set_max_chunk_bytes(1024);
  const Answer answer = Ask(request);
  const DecodedTensor small = answer.Decoded(kMaps);
  EXPECT_EQ(small.scales.size(), static_cast<size_t>(answer.infos.at(kMaps).axes(0).size()));
  ASSERT_EQ(small.values.size(), whole.values.size());
  const size_t slab = whole.values.size() / small.scales.size();
  for (size_t i = 0; i < whole.values.size(); ++i) {
    EXPECT_LE(std::abs(small.values[i] - whole.values[i]), double{small.scales[i / slab]} / 2);
  }
  EXPECT_EQ(answer.infos.at(kMaps).total_bytes(),
            static_cast<int64_t>(whole.values.size() + 8 * small.scales.size()));
  EXPECT_EQ(answer.finished.usage().tensor_bytes(), answer.infos.at(kMaps).total_bytes());
  EXPECT_THAT(answer.explanations.at("hidden_attention").mass_kept(), ElementsAre(1));
}

TEST(DeliveryCall, SparseRowsKeepTheMassThatWasAskedFor) {
  v1::PredictRequest request = MapsRequest();
  const DecodedTensor whole = Ask(request).Decoded(kMaps);
  request.mutable_delivery()->set_sparse_mass(0.9f);
  const Answer answer = Ask(request);
  const DecodedTensor sparse = answer.Decoded(kMaps);
  double mass = 0, kept = 0;
  ASSERT_EQ(sparse.values.size(), whole.values.size());
  for (size_t i = 0; i < whole.values.size(); ++i) {
    EXPECT_TRUE(sparse.values[i] == whole.values[i] || sparse.values[i] == 0);
    mass += std::abs(whole.values[i]);
    kept += std::abs(sparse.values[i]);
  }
  const auto& finished = answer.explanations.at("hidden_attention");
  ASSERT_EQ(finished.mass_kept_size(), 1);
  EXPECT_NEAR(finished.mass_kept(0), kept / mass, 1e-6);
  EXPECT_GE(finished.mass_kept(0), 0.9f);
  EXPECT_LT(finished.mass_kept(0), 1);
  EXPECT_LT(answer.bytes.at(kMaps).size(),
            static_cast<size_t>(answer.infos.at(kMaps).total_bytes()));
  EXPECT_EQ(answer.finished.usage().tensor_bytes(),
            static_cast<int64_t>(answer.bytes.at(kMaps).size()));
}

TEST(DeliveryCall, WhatCannotBeDeliveredIsRefused) {
  v1::PredictRequest request = MapsRequest();
  request.mutable_delivery()->set_dtype(v1::DATA_TYPE_UINT8);
  request.mutable_delivery()->set_sparse_top_k(0);
  EXPECT_THAT(RefusedFields(request),
              ElementsAre("delivery.sparse_top_k", "delivery.sparse_top_k"));
}

// ---- sums for people ----

v1::PredictRequest ScoresRequest() {
  v1::PredictRequest request = AtlasRequest(kText);
  v1::Explanation* first = request.add_explanations();
  first->set_id("lrp");
  first->mutable_mamba_lrp();
  v1::Aggregation* aggregation = first->mutable_aggregation();
  aggregation->set_words(true);
  aggregation->set_sentences(true);
  aggregation->add_spans()->set_begin(15);  // "France"
  aggregation->mutable_spans(0)->set_end(21);
  request.add_explanations()->mutable_gradient_x_input();
  v1::Explanation* map = request.add_explanations();
  map->set_id("map");
  map->mutable_attention_rollout()->set_rows(v1::ROWS_ALL);
  request.add_explanations()->mutable_raw_attention();
  return request;
}

TEST(AggregationCall, WordsSentencesAndSpansKeepTheTotal) {
  const Answer answer = Ask(ScoresRequest());
  const std::vector<double> scores = answer.Decoded("lrp/mamba_lrp").values;
  const double total = std::accumulate(scores.begin(), scores.end(), 0.0);
  const auto& groups = answer.explanations.at("lrp").groups();
  ASSERT_EQ(groups.size(), 3);
  for (const v1::GroupedScores& grouped : groups) {
    double sum = grouped.rest();
    for (const auto& group : grouped.groups()) sum += group.score();
    EXPECT_NEAR(sum, total, 1e-12 * (1 + std::abs(total))) << grouped.kind();
  }
  std::vector<std::string> words;
  for (const auto& group : groups[0].groups()) {
    if (group.special()) continue;
    words.push_back(
        std::string(kText).substr(group.begin_byte(), group.end_byte() - group.begin_byte()));
    double sum = 0;
    for (int32_t t = group.begin_token(); t < group.end_token(); ++t) sum += scores[t];
    EXPECT_NEAR(group.score(), sum, 1e-12);
  }
  EXPECT_THAT(words, ElementsAre("The", " capital", " of", " France", " is", " Paris", ".", " It's",
                                 " big", "."));
  EXPECT_EQ(answer.explanations.at("gradient_x_input").groups_size(), 0);
}

TEST(AggregationCall, TheTokensOfOneCharacterAreOneWordsAndOneSpans) {
  v1::PredictRequest request = AtlasRequest("Hi 😀 you");
  request.add_explanations()->mutable_gradient_x_input();
  v1::Aggregation* aggregation = request.mutable_explanations(0)->mutable_aggregation();
  aggregation->set_words(true);
  aggregation->add_spans()->set_begin(3);
  aggregation->mutable_spans(0)->set_end(7);
  const Answer answer = Ask(request);
  int first = -1, last = -1;
  for (int t = 0; t < answer.started.tokens_size(); ++t) {
    if (!answer.started.tokens(t).partial()) continue;
    if (first < 0) first = t;
    last = t;
  }
  ASSERT_LT(first, last);  // the vocabulary has no such character
  const auto& groups = answer.explanations.at("gradient_x_input").groups();
  int holding = 0;
  for (const auto& group : groups[0].groups()) {
    if (group.begin_token() > first || group.end_token() <= last) continue;
    ++holding;
    EXPECT_EQ(group.end_byte(), 7u);
  }
  EXPECT_EQ(holding, 1);
  EXPECT_EQ(groups[1].groups(0).end_token(), last + 1);
}

TEST(AggregationCall, GeneratedTokensFollowNoText) {
  v1::PredictRequest request = AtlasRequest("The capital of", 3);
  request.mutable_generation()->set_ignore_eos(true);
  v1::Explanation* explanation = request.add_explanations();
  explanation->mutable_gradient_x_input();
  explanation->mutable_target()->set_generated(2);
  explanation->mutable_aggregation()->set_words(true);
  request.add_explanations()->mutable_mamba_lrp();
  const Answer answer = Ask(request);
  const auto scores = answer.Decoded("gradient_x_input/gradient_x_input").values;
  ASSERT_EQ(static_cast<int>(scores.size()), answer.started.tokens_size() + 2);
  const auto& words = answer.explanations.at("gradient_x_input").groups(0);
  const auto& rest = words.groups(words.groups_size() - 1);
  EXPECT_EQ(rest.begin_byte(), rest.end_byte());
  EXPECT_EQ(rest.begin_token(), answer.started.tokens_size());
  EXPECT_EQ(rest.end_token(), static_cast<int>(scores.size()));
  EXPECT_EQ(answer.finished.agreements_size(), 0);  // of other lengths
}

TEST(AggregationCall, QuantisedScoresAreSummedAsTheyWere) {
  v1::PredictRequest request = ScoresRequest();
  const auto exact = Ask(request).explanations.at("lrp").groups(0).SerializeAsString();
  request.mutable_delivery()->set_dtype(v1::DATA_TYPE_UINT8);
  EXPECT_EQ(Ask(request).explanations.at("lrp").groups(0).SerializeAsString(), exact);
}

TEST(AggregationCall, AgreementsAreOfPairsThatGiveOneScoreAToken) {
  const Answer answer = Ask(ScoresRequest());
  std::vector<std::string> pairs;
  for (const v1::Agreement& agreement : answer.finished.agreements()) {
    pairs.push_back(agreement.first_id() + " " + agreement.second_id());
    EXPECT_TRUE(agreement.has_spearman() && agreement.has_kendall() && agreement.has_top_overlap());
    EXPECT_LE(std::abs(agreement.spearman()), 1);
    EXPECT_LE(std::abs(agreement.kendall()), 1);
    EXPECT_EQ(agreement.top(), std::min(10, (answer.started.tokens_size() + 1) / 2));
  }
  EXPECT_THAT(pairs, ElementsAre("lrp gradient_x_input", "lrp raw_attention",
                                 "gradient_x_input raw_attention"));
}

TEST(AggregationCall, WhatHasNoTextOrNoScoreATokenIsRefused) {
  v1::PredictRequest ids = TinyRequest({3, 1, 4});
  v1::Explanation* explanation = ids.add_explanations();
  explanation->mutable_raw_attention();
  v1::Aggregation* aggregation = explanation->mutable_aggregation();
  aggregation->set_words(true);
  aggregation->set_sentences(true);
  aggregation->add_spans();
  aggregation->set_pixels(true);
  EXPECT_THAT(RefusedFields(ids), UnorderedElementsAre("explanations[0].aggregation.words",
                                                       "explanations[0].aggregation.sentences",
                                                       "explanations[0].aggregation.spans",
                                                       "explanations[0].aggregation.pixels"));
  v1::PredictRequest maps = MapsRequest();
  maps.mutable_explanations(0)->mutable_aggregation()->set_words(true);
  EXPECT_THAT(RefusedFields(maps), ElementsAre("explanations[0].aggregation"));
}

TEST(AggregationCall, PixelsAreThePatchesScoresUpsampled) {
  v1::PredictRequest request;
  request.set_model("vim");
  v1::ImageTensor* tensor = request.mutable_image()->mutable_tensor();
  tensor->set_height(16);
  tensor->set_width(16);
  std::vector<float> image(3 * 16 * 16);
  for (size_t i = 0; i < image.size(); ++i) image[i] = 0.5f * static_cast<float>(i % 17);
  tensor->set_values(image.data(), image.size() * sizeof(float));
  request.add_explanations()->mutable_gradient_x_input();
  request.mutable_explanations(0)->mutable_aggregation()->set_pixels(true);
  request.mutable_delivery()->set_sparse_top_k(100);
  const Answer answer = Ask(request);
  const v1::TensorInfo& info = answer.infos.at("gradient_x_input/pixels");
  EXPECT_EQ(info.axes(0).name(), "rows");
  EXPECT_EQ(info.axes(1).name(), "columns");
  EXPECT_EQ(info.encoding(), v1::ENCODING_DENSE);
  const auto scores = answer.Decoded("gradient_x_input/gradient_x_input").values;
  const std::vector<float> tokens(scores.begin(), scores.end());
  const std::vector<float> expected =
      explain::PixelScores(tokens, TestModel("vim")->model->config().vision);
  const auto pixels = answer.Decoded("gradient_x_input/pixels").values;
  EXPECT_EQ(std::vector<float>(pixels.begin(), pixels.end()), expected);
  EXPECT_THAT(answer.explanations.at("gradient_x_input").digests(), SizeIs(2));
  EXPECT_THAT(answer.explanations.at("gradient_x_input").mass_kept(), ElementsAre(1, 1));
}

}  // namespace
}  // namespace mambascope::serving
