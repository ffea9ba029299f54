#include "server/serving/generation.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/served_models.h"

namespace mambascope::serving {
namespace {

// Logits that make `token` certain.
std::vector<float> Certain(const ServedModel& model, int32_t token) {
  std::vector<float> logits(model.model->config().vocabulary, 0.0f);
  logits[token] = 50.0f;
  return logits;
}

std::vector<int32_t> Ids(const ServedModel& model, const std::string& text) {
  std::vector<int32_t> ids;
  const auto encoded = model.tokenizer->Encode(text, /*add_special_tokens=*/false);
  for (const model::Token& token : *encoded) ids.push_back(token.id);
  return ids;
}

// Feeds the tokens of `text` and returns the concatenated event texts.
std::string Generate(Generation& generation, const ServedModel& model, const std::string& text) {
  std::string out;
  for (int32_t id : Ids(model, text)) {
    if (generation.is_over()) break;
    out += generation.Next(Certain(model, id)).text();
  }
  return out;
}

v1::Generation Options(int max_tokens, std::initializer_list<std::string> stops = {}) {
  v1::Generation options;
  options.set_max_tokens(max_tokens);
  for (const std::string& stop : stops) options.add_stop(stop);
  return options;
}

TEST(Generation, EndsAfterMaxTokens) {
  const auto model = TestModel("atlas");
  Generation generation(Options(3), *model);
  Generate(generation, *model, "the capital of the country is");
  EXPECT_EQ(generation.count(), 3);
  EXPECT_EQ(generation.finish_reason(), v1::FINISH_REASON_LENGTH);
}

TEST(Generation, EndsWithTheTextUnlessToldToGoOn) {
  const auto model = TestModel("atlas");
  const int32_t end = model->model->config().end_of_text.front();
  Generation generation(Options(5), *model);
  generation.Next(Certain(*model, end));
  EXPECT_EQ(generation.finish_reason(), v1::FINISH_REASON_END_OF_TEXT);
  v1::Generation on = Options(5);
  on.set_ignore_eos(true);
  Generation going_on(on, *model);
  going_on.Next(Certain(*model, end));
  EXPECT_FALSE(going_on.is_over());
}

TEST(Generation, ATextIsCutBeforeTheFirstStopString) {
  const auto model = TestModel("atlas");
  Generation generation(Options(100, {"zzz", " of the"}), *model);
  EXPECT_EQ(Generate(generation, *model, "The capital of the country"), "The capital");
  EXPECT_EQ(generation.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(generation.text(), "The capital");
}

TEST(Generation, WhatMightBeginAStopStringWaitsAndComesIfItDoesNot) {
  const auto model = TestModel("atlas");
  Generation generation(Options(100, {" of nothing"}), *model);
  const std::string text = "The capital of the country";
  const auto ids = Ids(*model, text);
  std::string delivered, full;
  for (size_t i = 0; i < ids.size(); ++i) {
    const v1::TokenEvent event = generation.Next(Certain(*model, ids[i]));
    delivered += event.text();
    full += *model->tokenizer->Decode(std::vector<int32_t>{ids[i]}, true);
    if (full == "The capital of") {
      EXPECT_EQ(delivered, "The capital");
    }
  }
  EXPECT_EQ(delivered, text);
}

TEST(Generation, ASplitCharacterComesWithItsLastToken) {
  const auto model = TestModel("atlas");
  Generation generation(Options(100), *model);
  const std::string text = "\xF0\x9F\x98\x80 x";  // an emoji: several byte tokens
  ASSERT_GT(Ids(*model, text).size(), 2u);
  EXPECT_EQ(generation.Next(Certain(*model, Ids(*model, text)[0])).text(), "");
  Generation whole(Options(100), *model);
  EXPECT_EQ(Generate(whole, *model, text), text);
}

TEST(Generation, LogProbabilitiesAreThoseOfTheSoftmax) {
  const auto model = TestModel("tiny");
  v1::Generation options = Options(2);
  options.set_top_logprobs(3);
  Generation generation(options, *model);
  std::vector<float> logits(model->model->config().vocabulary, -1e9f);
  logits[3] = std::log(0.5f);
  logits[5] = std::log(0.3f);
  logits[7] = std::log(0.2f);
  const v1::TokenEvent event = generation.Next(logits);
  EXPECT_EQ(event.token_id(), 3);
  EXPECT_NEAR(event.log_probability(), std::log(0.5), 1e-6);
  ASSERT_EQ(event.top_size(), 3);
  EXPECT_EQ(event.top(1).token_id(), 5);
  EXPECT_NEAR(event.top(2).log_probability(), std::log(0.2), 1e-6);
}

TEST(Generation, TheSameSeedGivesTheSameTokens) {
  const auto model = TestModel("tiny");
  v1::Generation options = Options(50);
  options.set_temperature(1.5f);
  options.set_seed(42);
  options.set_ignore_eos(true);
  const auto run = [&] {
    Generation generation(options, *model);
    const std::vector<float> logits(model->model->config().vocabulary, 0.0f);
    std::vector<int32_t> tokens;
    while (!generation.is_over()) tokens.push_back(generation.Next(logits).token_id());
    return tokens;
  };
  const std::vector<int32_t> first = run();
  EXPECT_EQ(first, run());
  options.set_seed(43);
  EXPECT_NE(first, run());
}

}  // namespace
}  // namespace mambascope::serving
