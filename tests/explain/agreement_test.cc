#include "server/explain/agreement.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/support/safetensors_io.h"

namespace mambascope::explain {
namespace {

RankedScores Ranked(const std::vector<double>& values) {
  return RankedScores(std::span<const double>(values));
}

TEST(Agreement, IsTheOraclesToTheLastDigits) {
  const auto golden =
      testing::ReadSafetensors(MAMBASCOPE_SOURCE_DIR "/tests/golden/ranking.safetensors");
  for (const std::string name : {"plain", "ties", "one_gold"}) {
    const RankedScores a = Ranked(testing::F64(golden.at(name + "/scores")));
    const RankedScores b = Ranked(testing::F64(golden.at(name + "/other")));
    const auto expected = [&](const char* what) {
      return testing::F64(golden.at(name + what)).at(0);
    };
    EXPECT_NEAR(*Spearman(a, b), expected("/spearman"), 1e-12) << name;
    EXPECT_NEAR(*KendallTauB(a, b), expected("/kendall"), 1e-12) << name;
    EXPECT_NEAR(*TopOverlap(a, b, 3), expected("/top3_overlap"), 1e-12) << name;
  }
}

int Sign(double value) { return (value > 0) - (value < 0); }

// By all pairs, as the definitions stand.
double PlainKendall(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0, of_a = 0, of_b = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const int x = Sign(a[i] - a[j]), y = Sign(b[i] - b[j]);
      sum += x * y;
      of_a += x * x;
      of_b += y * y;
    }
  }
  return sum / std::sqrt(of_a * of_b);
}

double PlainSpearman(const std::vector<double>& a, const std::vector<double>& b) {
  const auto ranks = [](const std::vector<double>& v) {
    std::vector<double> out;
    for (const double x : v) {
      double rank = -0.5 * (static_cast<double>(v.size()) - 1);
      for (const double y : v) rank += (y < x) + 0.5 * (y == x);
      out.push_back(rank - 0.5);
    }
    return out;
  };
  const auto x = ranks(a), y = ranks(b);
  double xy = 0, xx = 0, yy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    xy += x[i] * y[i];
    xx += x[i] * x[i];
    yy += y[i] * y[i];
  }
  return xy / std::sqrt(xx * yy);
}

TEST(Agreement, IsThatOfAllPairsOnRandomVectorsWithTies) {
  std::mt19937_64 random(5);
  int compared = 0;
  for (int round = 0; round < 500; ++round) {
    const size_t size = 1 + random() % 40;
    const int64_t levels = 1 + static_cast<int64_t>(random() % 30);
    std::vector<double> a(size), b(size);
    for (size_t i = 0; i < size; ++i) {
      a[i] = static_cast<double>(static_cast<int64_t>(random() % levels) - levels / 2);
      b[i] = random() % 3 ? static_cast<double>(random() % levels) : a[i];
    }
    const RankedScores x = Ranked(a), y = Ranked(b);
    ASSERT_EQ(Spearman(x, y).has_value(), !x.constant() && !y.constant());
    ASSERT_EQ(KendallTauB(x, y).has_value(), Spearman(x, y).has_value());
    ASSERT_EQ(TopOverlap(x, y, 2).has_value(), Spearman(x, y).has_value());
    if (!Spearman(x, y).has_value()) continue;
    EXPECT_NEAR(*Spearman(x, y), PlainSpearman(a, b), 1e-12);
    EXPECT_NEAR(*KendallTauB(x, y), PlainKendall(a, b), 1e-12);
    EXPECT_EQ(*KendallTauB(x, y), *KendallTauB(y, x));
    ++compared;
  }
  EXPECT_GT(compared, 350);
}

TEST(Agreement, WithItselfIsOneAndReversedMinusOne) {
  const RankedScores up = Ranked({-3, -1, 0, 2, 9}), down = Ranked({3, 1, 0, -2, -9});
  EXPECT_EQ(Spearman(up, up), 1.0);
  EXPECT_EQ(KendallTauB(up, up), 1.0);
  EXPECT_EQ(TopOverlap(up, up, 4), 1.0);
  EXPECT_EQ(Spearman(up, down), -1.0);
  EXPECT_EQ(KendallTauB(up, down), -1.0);
  EXPECT_EQ(TopOverlap(up, down, 2), 0.0);
}

TEST(Agreement, NothingIsDefinedOfAConstant) {
  for (const auto& constant : {std::vector<double>{2, 2, 2}, std::vector<double>{-1, -1, -1}}) {
    EXPECT_FALSE(Spearman(Ranked(constant), Ranked({1, 2, 3})).has_value());
    EXPECT_FALSE(KendallTauB(Ranked({1, 2, 3}), Ranked(constant)).has_value());
    EXPECT_FALSE(TopOverlap(Ranked(constant), Ranked(constant), 1).has_value());
  }
  EXPECT_TRUE(Ranked({7}).constant());
  EXPECT_TRUE(Ranked({}).constant());
}

// The best is the largest value, whatever its magnitude; of equal ones the lower index.
TEST(Agreement, TheTopGoesByValueAndThenByIndex) {
  EXPECT_EQ(TopOverlap(Ranked({-9, 1, 0, 0}), Ranked({0, 5, 5, 0}), 1), 1.0);
  EXPECT_EQ(TopOverlap(Ranked({0, 0, 0, 1}), Ranked({1, 0, 0, 0}), 2), 0.5);
  EXPECT_EQ(TopOverlap(Ranked({0, 0, 0, 1}), Ranked({0, 0, 1, 0}), 3), 2.0 / 3);
  EXPECT_EQ(TopOverlap(Ranked({0, 1}), Ranked({1, 0}), 100), 1.0);  // no more than there are
}

TEST(AgreementList, HoldsEveryPairOfEqualLengthOnce) {
  AgreementList list;
  google::protobuf::RepeatedPtrField<v1::Agreement> agreements;
  const std::vector<float> up = {1, 2, 3, 4, 5}, flat(5, 0.25f), down = {5, 4, 3, 2, 1},
                           other = {1, 2};
  list.Add("up", up, &agreements);
  list.Add("other", other, &agreements);
  list.Add("flat", flat, &agreements);
  list.Add("down", down, &agreements);
  ASSERT_EQ(agreements.size(), 3);
  const auto names = [&](int i) {
    return agreements[i].first_id() + " " + agreements[i].second_id();
  };
  EXPECT_EQ(names(0), "up flat");
  EXPECT_EQ(names(1), "up down");
  EXPECT_EQ(names(2), "flat down");
  EXPECT_FALSE(agreements[0].has_spearman() || agreements[0].has_kendall() ||
               agreements[0].has_top_overlap());
  EXPECT_EQ(agreements[1].spearman(), -1);
  EXPECT_EQ(agreements[1].kendall(), -1);
  EXPECT_EQ(agreements[1].top(), 3);
  EXPECT_NEAR(agreements[1].top_overlap(), 1.0 / 3, 1e-15);
}

TEST(AgreementList, TheTopIsAtMostTen) {
  AgreementList list;
  google::protobuf::RepeatedPtrField<v1::Agreement> agreements;
  std::vector<float> scores(1000);
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i * 7919 % 1000);
  list.Add("a", scores, &agreements);
  list.Add("b", scores, &agreements);
  EXPECT_EQ(agreements[0].top(), 10);
  EXPECT_EQ(agreements[0].top_overlap(), 1);
  EXPECT_EQ(agreements[0].kendall(), 1);
}

}  // namespace
}  // namespace mambascope::explain
