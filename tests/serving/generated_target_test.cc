// Explanations of generated tokens, while generation goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tests/support/serving_bench.h"

namespace mambascope::serving {
namespace {

using ::testing::HasSubstr;

const std::vector<int32_t> kPrompt = {5, 17, 42, 3, 9};

struct Answer {
  std::vector<int32_t> tokens;
  std::map<std::string, std::string> tensors;  // bytes by "id/tensor"
  std::map<std::string, v1::ResolvedTarget> targets;
  std::map<std::string, v1::ExplanationFinished> ends;
  v1::Finished finished;
};

Answer Ask(const v1::PredictRequest& request) {
  ServingBench bench;
  const auto sent = bench.Send(request);
  EXPECT_TRUE(sent.refusal.ok()) << sent.refusal;
  bench.Run();
  Answer answer;
  for (const v1::PredictEvent& event : ServingBench::Read(*sent.results)) {
    if (event.has_token()) answer.tokens.push_back(event.token().token_id());
    if (event.has_explanation_started()) {
      answer.targets[event.explanation_started().explanation_id()] =
          event.explanation_started().target();
    }
    if (event.has_tensor_chunk()) {
      answer.tensors[event.tensor_chunk().explanation_id() + "/" + event.tensor_chunk().tensor()] +=
          event.tensor_chunk().data();
    }
    if (event.has_explanation_finished()) {
      answer.ends[event.explanation_finished().explanation_id()] = event.explanation_finished();
    }
    if (event.has_finished()) answer.finished = event.finished();
  }
  return answer;
}

absl::Status Refusal(const v1::PredictRequest& request) {
  ServingBench bench;
  return bench.Send(request).refusal;
}

std::vector<float> Floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
  return values;
}

void AddMethods(const v1::Target& target, const std::string& suffix, v1::PredictRequest* request) {
  request->add_explanations()->mutable_raw_attention();
  request->add_explanations()->mutable_attention_rollout();
  request->add_explanations()->mutable_gradient_x_input();
  request->add_explanations()->mutable_mamba_lrp();
  const char* const names[] = {"raw", "rollout", "gradient", "lrp"};
  const int first = request->explanations_size() - 4;
  for (int i = 0; i < 4; ++i) {
    *request->mutable_explanations(first + i)->mutable_target() = target;
    request->mutable_explanations(first + i)->set_id(names[i] + suffix);
  }
}

TEST(GeneratedTarget, IsTheSameAsThePromptWithItsTokens) {
  v1::PredictRequest request = TinyRequest(kPrompt, 5);
  for (const int k : {0, 2, 4}) {
    v1::Target target;
    target.set_generated(k);
    AddMethods(target, std::to_string(k), &request);
  }
  const Answer answer = Ask(request);
  ASSERT_EQ(answer.tokens.size(), 5u);
  for (const int k : {0, 2, 4}) {
    std::vector<int32_t> longer = kPrompt;
    longer.insert(longer.end(), answer.tokens.begin(), answer.tokens.begin() + k);
    v1::PredictRequest other = TinyRequest(longer, 1);
    v1::Target target;
    target.set_token_id(answer.tokens[k]);
    AddMethods(target, std::to_string(k), &other);
    const Answer expected = Ask(other);
    ASSERT_EQ(expected.tensors.size(), 4u);
    for (const auto& [name, bytes] : expected.tensors) {
      ASSERT_EQ(answer.tensors.count(name), 1u) << name;
      EXPECT_EQ(answer.tensors.at(name), bytes) << name << ", bit for bit";
    }
    const v1::ResolvedTarget& resolved = answer.targets.at("lrp" + std::to_string(k));
    EXPECT_EQ(resolved.generated(), k);
    EXPECT_EQ(resolved.token_id(), answer.tokens[k]);
    EXPECT_EQ(resolved.position(), static_cast<int>(kPrompt.size()) + k - 1);
    EXPECT_EQ(resolved.value(), expected.targets.at("lrp" + std::to_string(k)).value());
  }
}

TEST(GeneratedTarget, ASpanIsTheSumOfItsTokens) {
  v1::PredictRequest request = TinyRequest(kPrompt, 4);
  v1::Target span;
  span.set_generated(1);
  span.set_generated_end(4);
  AddMethods(span, "", &request);
  for (int k = 1; k < 4; ++k) {
    v1::Target one;
    one.set_generated(k);
    AddMethods(one, std::to_string(k), &request);
  }
  const Answer answer = Ask(request);
  for (const std::string method : {"gradient", "lrp"}) {
    const std::string tensor = method == "lrp" ? "/mamba_lrp" : "/gradient_x_input";
    const std::vector<float> all = Floats(answer.tensors.at(method + tensor));
    EXPECT_TRUE(answer.ends.at(method).quality().within_tolerance()) << method;
    ASSERT_EQ(all.size(), kPrompt.size() + 3);
    for (size_t j = 0; j < all.size(); ++j) {
      float sum = 0;
      for (int k = 1; k < 4; ++k) {
        const std::vector<float> part =
            Floats(answer.tensors.at(method + std::to_string(k) + tensor));
        if (j < part.size()) sum += part[j];
      }
      EXPECT_NEAR(all[j], sum, 1e-4) << method << " " << j;
    }
  }
  EXPECT_EQ(answer.targets.at("lrp").generated_end(), 4);
}

TEST(GeneratedTarget, FailsAloneWhenGenerationEndsEarlier) {
  v1::PredictRequest request = AtlasRequest("The capital of France is", 30);
  request.mutable_generation()->add_stop(".");
  request.add_explanations()->mutable_raw_attention();
  request.mutable_explanations(0)->mutable_target()->set_generated(29);
  request.add_explanations()->mutable_attention_rollout();
  const Answer answer = Ask(request);
  EXPECT_EQ(answer.ends.at("raw_attention").status().code(), 11);
  EXPECT_THAT(answer.ends.at("raw_attention").status().message(), HasSubstr("generation ended"));
  EXPECT_EQ(answer.ends.at("attention_rollout").status().code(), 0);
  EXPECT_EQ(answer.finished.status().code(), 0);
}

TEST(GeneratedTarget, WrongOnesAreNamed) {
  const auto refused = [](auto change) {
    v1::PredictRequest request = TinyRequest(kPrompt, 3);
    request.add_explanations()->mutable_raw_attention();
    change(request.mutable_explanations(0)->mutable_target());
    return std::string(Refusal(request).message());
  };
  EXPECT_THAT(refused([](auto* t) { t->set_generated(3); }),
              HasSubstr("target.generated: 3 is outside the 3 tokens"));
  EXPECT_THAT(refused([](auto* t) { t->set_generated(-1); }), HasSubstr("target.generated: -1"));
  EXPECT_THAT(refused([](auto* t) { t->set_generated(1), t->set_generated_end(1); }),
              HasSubstr("target.generated_end: 1 is outside 2 to 3"));
  EXPECT_THAT(refused([](auto* t) { t->set_generated_end(1); }), HasSubstr("needs generated"));
  EXPECT_THAT(refused([](auto* t) { t->set_generated(1), t->set_position(1); }),
              HasSubstr("does not go with position"));
  EXPECT_THAT(
      refused([](auto* t) { t->set_generated(0), t->set_generated_end(2), t->set_token_id(4); }),
      HasSubstr("neither an output nor a contrast"));
}

}  // namespace
}  // namespace mambascope::serving
