#include "server/model/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace mambascope::model {
namespace {

std::vector<float> RandomLogits(int size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> logits(size);
  for (float& logit : logits) logit = static_cast<float>(random() >> 40) * 0x1p-21f - 4;
  return logits;
}

std::map<int32_t, int> Draw(const std::vector<float>& logits, const SamplingOptions& options,
                            int times) {
  std::mt19937_64 random(3);
  std::map<int32_t, int> drawn;
  for (int i = 0; i < times; ++i) ++drawn[SampleToken(logits, options, random)];
  return drawn;
}

TEST(Sampling, TemperatureZeroTakesTheMostProbableAndDrawsNothing) {
  std::mt19937_64 random(1), untouched(1);
  EXPECT_EQ(SampleToken(std::vector<float>{1, 5, 3}, {}, random), 1);
  EXPECT_EQ(SampleToken(std::vector<float>{1, 5, 5}, {}, random), 1) << "ties go to the lower id";
  EXPECT_EQ(random, untouched);
}

TEST(Sampling, DrawsOneNumberAToken) {
  const std::vector<float> logits = RandomLogits(100, 1);
  for (const SamplingOptions options : {SamplingOptions{1, 1, 0}, SamplingOptions{0.5f, 0.9f, 20},
                                        SamplingOptions{2, 0.3f, 0}, SamplingOptions{1, 1, 1}}) {
    std::mt19937_64 random(1), stepped(1);
    SampleToken(logits, options, random);
    stepped();
    EXPECT_EQ(random, stepped);
  }
}

TEST(Sampling, FrequenciesAreTheSoftmaxAtThatTemperature) {
  const std::vector<float> logits = {0.5f, -1, 2, 1, -3};
  for (const float temperature : {0.5f, 1.0f, 3.0f}) {
    SCOPED_TRACE(temperature);
    constexpr int kTimes = 40000;
    const std::map<int32_t, int> drawn = Draw(logits, {temperature, 1, 0}, kTimes);
    double total = 0;
    for (const float logit : logits) total += std::exp(logit / temperature);
    for (int32_t id = 0; id < 5; ++id) {
      const double p = std::exp(logits[id] / temperature) / total;
      const int count = drawn.count(id) ? drawn.at(id) : 0;
      EXPECT_NEAR(count, kTimes * p, 5 * std::sqrt(kTimes * p * (1 - p)) + 1) << id;  // 5 sigma
    }
  }
}

TEST(Sampling, TopKKeepsTheKMostProbable) {
  const std::vector<float> logits = RandomLogits(1000, 2);
  for (const int32_t k : {1, 2, 5, 999}) {
    SCOPED_TRACE(k);
    std::set<int32_t> allowed;
    for (const RankedToken& token : TopTokens(logits, k)) allowed.insert(token.id);
    const std::map<int32_t, int> drawn = Draw(logits, {5, 1, k}, 2000);
    for (const auto& [id, count] : drawn) EXPECT_TRUE(allowed.count(id)) << id;
    if (k <= 5) {
      EXPECT_EQ(drawn.size(), allowed.size());
    }
  }
  EXPECT_EQ(Draw(logits, {5, 1, 0}, 2000), Draw(logits, {5, 1, 5000}, 2000))
      << "k above the vocabulary";
}

TEST(Sampling, TopPKeepsTheShortestRunThatReachesIt) {
  const std::vector<float> logits = {std::log(0.2f), std::log(0.5f), std::log(0.05f),
                                     std::log(0.25f)};
  const auto kept = [&](float top_p, int32_t top_k) {
    std::set<int32_t> ids;
    for (const auto& [id, count] : Draw(logits, {1, top_p, top_k}, 2000)) ids.insert(id);
    return ids;
  };
  EXPECT_EQ(kept(0, 0), std::set<int32_t>({1})) << "one always stays";
  EXPECT_EQ(kept(0.45f, 0), std::set<int32_t>({1}));
  EXPECT_EQ(kept(0.6f, 0), std::set<int32_t>({1, 3}));
  EXPECT_EQ(kept(0.8f, 0), std::set<int32_t>({0, 1, 3}));
  EXPECT_EQ(kept(0.97f, 0), std::set<int32_t>({0, 1, 2, 3}));
  // Of the two that top_k left, token 1 has two thirds.
  EXPECT_EQ(kept(0.6f, 2), std::set<int32_t>({1}));
  EXPECT_EQ(kept(0.7f, 2), std::set<int32_t>({1, 3}));
}

TEST(Sampling, KeptTokensHaveTheirSharesOfEachOther) {
  const std::vector<float> logits = {std::log(0.2f), std::log(0.5f), std::log(0.05f),
                                     std::log(0.25f)};
  constexpr int kTimes = 40000;
  const std::map<int32_t, int> drawn = Draw(logits, {1, 0.6f, 0}, kTimes);
  EXPECT_NEAR(drawn.at(1), kTimes * 2.0 / 3, 5 * std::sqrt(kTimes * 2.0 / 9));  // 5 sigma
}

TEST(Sampling, TheSameSeedGivesTheSameTokens) {
  const std::vector<float> logits = RandomLogits(50280, 4);
  std::mt19937_64 first(11), second(11);
  for (int i = 0; i < 20; ++i) {
    const SamplingOptions options{0.8f, 0.95f, i % 2 == 0 ? 0 : 40};
    EXPECT_EQ(SampleToken(logits, options, first), SampleToken(logits, options, second));
  }
}

TEST(Sampling, ExtremeTemperaturesStayInTheVocabulary) {
  const std::vector<float> logits = {-3e38f, 3e38f, 0, 3e38f};
  for (const float temperature : {1e-45f, 1e-10f, 1e30f, 3e38f}) {
    for (const float top_p : {0.5f, 1.0f}) {
      for (const auto& [id, count] : Draw(logits, {temperature, top_p, 0}, 50)) {
        EXPECT_GE(id, 0);
        EXPECT_LT(id, 4);
        if (temperature < 1) {
          EXPECT_TRUE(id == 1 || id == 3) << id;
        }
      }
    }
  }
}

TEST(Sampling, LogProbabilitiesAreThoseOfTheSoftmaxAtAnyScale) {
  const std::vector<float> logits = RandomLogits(50280, 5);
  constexpr size_t kFew = 20;
  for (const float shift : {0.0f, 1000.0f, -1000.0f}) {
    SCOPED_TRACE(shift);
    std::vector<float> shifted = logits;
    for (float& logit : shifted) logit += shift;
    double sum = 0;
    for (size_t id = 0; id < kFew; ++id) sum += std::exp(LogProbability(shifted, id));
    double expected = 0, total = 0;
    for (size_t id = 0; id < shifted.size(); ++id) {
      const double weight = std::exp(static_cast<double>(shifted[id]) - shift);
      total += weight;
      if (id < kFew) expected += weight;
    }
    EXPECT_NEAR(sum / (expected / total), 1, 1e-5);  // a float's log probability, near -10
  }
}

TEST(Sampling, TopTokensAreOrderedWithTiesToTheLowerId) {
  const std::vector<float> logits = {1, 3, 2, 3, -1};
  const std::vector<RankedToken> top = TopTokens(logits, 4);
  ASSERT_EQ(top.size(), 4u);
  EXPECT_EQ(top[0].id, 1);
  EXPECT_EQ(top[1].id, 3);
  EXPECT_EQ(top[2].id, 2);
  EXPECT_EQ(top[3].id, 0);
  for (const RankedToken& token : top) {
    EXPECT_EQ(token.log_probability, LogProbability(logits, token.id));
  }
  EXPECT_EQ(TopTokens(logits, 9).size(), 5u);
  EXPECT_TRUE(TopTokens(logits, 0).empty());
}

}  // namespace
}  // namespace mambascope::model
