#include "server/kernels/hidden_attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/reference_attention.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::RandomScan;
using reference::ReferenceAttention;
using reference::SameBits;

struct Shape {
  int64_t tokens, d_inner, d_state;
};

// Around the kernels' blocks of 16, 32, 64 and 128 tokens and of 16 channels.
const Shape kShapes[] = {
    {1, 1, 1},    {1, 5, 16},   {2, 17, 3},    {15, 16, 16}, {16, 3, 7},   {17, 33, 4},
    {31, 7, 1},   {33, 16, 5},  {63, 9, 2},    {65, 20, 16}, {100, 2, 31}, {127, 1, 16},
    {128, 6, 8},  {129, 18, 3}, {130, 4, 1},   {161, 3, 16}, {193, 2, 5},  {256, 5, 4},
    {257, 1, 16}, {20, 2, 256}, {150, 1, 100}, {391, 2, 3},
};

constexpr float kUntouched = 12345.0f;  // what outputs hold before: every element must be written

template <class Fill>
std::vector<float> Filled(int64_t size, const Fill& fill) {
  std::vector<float> out(size, kUntouched);
  fill(out.data());
  return out;
}

std::vector<float> Mean(ThreadPool& pool, const ScanParameters& scan) {
  return Filled(scan.tokens * scan.tokens, [&](float* map) { MeanMap(pool, scan, map); });
}
std::vector<float> AbsMean(ThreadPool& pool, const ScanParameters& scan) {
  return Filled(scan.tokens * scan.tokens, [&](float* map) { AbsMeanMap(pool, scan, map); });
}
std::vector<float> MeanOf(ThreadPool& pool, const ScanParameters& scan,
                          const std::vector<int32_t>& channels) {
  return Filled(scan.tokens * scan.tokens,
                [&](float* map) { MeanMapOfChannels(pool, scan, channels, map); });
}
std::vector<float> Mass(ThreadPool& pool, const ScanParameters& scan) {
  return Filled(scan.d_inner, [&](float* mass) { ChannelMass(pool, scan, mass); });
}
std::vector<float> Channels(ThreadPool& pool, const ScanParameters& scan,
                            const std::vector<int32_t>& channels) {
  return Filled(channels.size() * scan.tokens * scan.tokens,
                [&](float* maps) { ChannelMaps(pool, scan, channels, maps); });
}
std::vector<float> States(ThreadPool& pool, const ScanParameters& scan, int32_t channel,
                          const std::vector<int32_t>& states) {
  return Filled(states.size() * scan.tokens * scan.tokens,
                [&](float* maps) { StateMaps(pool, scan, channel, states, maps); });
}
std::vector<float> Decays(ThreadPool& pool, const ScanParameters& scan, int32_t channel,
                          const std::vector<int32_t>& states) {
  return Filled(states.size() * scan.tokens * scan.tokens,
                [&](float* maps) { DecayMaps(pool, scan, channel, states, maps); });
}
std::vector<float> Rows(ThreadPool& pool, const ScanParameters& scan, int64_t target,
                        bool without_target_decay = false) {
  return Filled(scan.tokens * scan.d_inner,
                [&](float* rows) { TargetRows(pool, scan, target, without_target_decay, rows); });
}
std::vector<float> Adjoint(ThreadPool& pool, const ScanParameters& scan,
                           const std::vector<int32_t>& channels, const std::vector<float>& v) {
  return Filled(scan.tokens, [&](float* out) { MeanAdjoint(pool, scan, channels, v.data(), out); });
}
std::vector<float> Forward(ThreadPool& pool, const ScanParameters& scan,
                           const std::vector<int32_t>& channels, const std::vector<float>& v) {
  return Filled(scan.tokens, [&](float* out) { MeanForward(pool, scan, channels, v.data(), out); });
}

std::vector<int32_t> All(int64_t count) {
  std::vector<int32_t> all(count);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// out[j] = sum_i v[i] map[i, j], and sum_j map[i, j] v[j].
std::vector<double> RowTimesMap(const std::vector<float>& v, const std::vector<double>& map) {
  const size_t tokens = v.size();
  std::vector<double> out(tokens);
  for (size_t i = 0; i < tokens; ++i) {
    for (size_t j = 0; j < tokens; ++j) out[j] += v[i] * map[i * tokens + j];
  }
  return out;
}
std::vector<double> MapTimesColumn(const std::vector<double>& map, const std::vector<float>& v) {
  const size_t tokens = v.size();
  std::vector<double> out(tokens);
  for (size_t i = 0; i < tokens; ++i) {
    for (size_t j = 0; j < tokens; ++j) out[i] += map[i * tokens + j] * v[j];
  }
  return out;
}
double Dot(const std::vector<float>& a, const std::vector<float>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}
std::vector<double> Doubles(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

// Runs `test(scan, definition, seed)` on every shape and instruction set.
template <class Test>
void OnEveryShape(const Test& test) {
  uint32_t seed = 0;
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.tokens << " tokens, " << shape.d_inner << " channels, "
                                    << shape.d_state << " states");
    const RandomScan random(shape.tokens, shape.d_inner, shape.d_state, ++seed);
    const ReferenceAttention definition(random.parameters);
    test(random.parameters, definition, seed);
  }
}

TEST(HiddenAttention, MeanMapIsTheMeanOfAllChannels) {
  ThreadPool pool(2);
  OnEveryShape([&](const ScanParameters& scan, const ReferenceAttention& definition, uint32_t) {
    const std::vector<double> expected = definition.Mean(All(scan.d_inner));
    OnEveryTarget([&] { EXPECT_TRUE(Close(Mean(pool, scan), expected)); });
  });
}

TEST(HiddenAttention, AbsMeanMapIsTheMeanOfMagnitudes) {
  ThreadPool pool(2);
  OnEveryShape([&](const ScanParameters& scan, const ReferenceAttention& definition, uint32_t) {
    const std::vector<double> expected = definition.Mean(All(scan.d_inner), /*absolute=*/true);
    OnEveryTarget([&] { EXPECT_TRUE(Close(AbsMean(pool, scan), expected)); });
  });
}

TEST(HiddenAttention, MeanMapOfChannelsTakesThemInAnyOrderAndTwice) {
  ThreadPool pool(2);
  OnEveryShape(
      [&](const ScanParameters& scan, const ReferenceAttention& definition, uint32_t seed) {
        std::mt19937 random(seed);
        std::vector<int32_t> channels;
        for (int64_t c = 0; c < scan.d_inner + 2; ++c) channels.push_back(random() % scan.d_inner);
        for (const size_t count : {size_t{1}, channels.size()}) {
          channels.resize(count);
          const std::vector<double> expected = definition.Mean(channels);
          OnEveryTarget([&] { EXPECT_TRUE(Close(MeanOf(pool, scan, channels), expected)); });
          if (count == 1) channels.assign(scan.d_inner + 2, scan.d_inner - 1);
        }
      });
}

TEST(HiddenAttention, PartsOfAMeanMapAddUpToIt) {
  ThreadPool pool(2);
  for (const Shape shape : {Shape{1, 3, 2}, Shape{130, 70, 5}, Shape{40, 33, 16}}) {
    const RandomScan random(shape.tokens, shape.d_inner, shape.d_state, 3);
    const ScanParameters& scan = random.parameters;
    const ReferenceAttention definition(scan);
    const std::vector<int32_t> all = All(scan.d_inner);
    for (const bool absolute : {false, true}) {
      const std::vector<double> expected = definition.Mean(all, absolute);
      OnEveryTarget([&] {
        std::vector<float> map(scan.tokens * scan.tokens, kUntouched);
        for (int64_t begin = 0; begin < scan.d_inner; begin += 17) {
          const int64_t count = std::min<int64_t>(17, scan.d_inner - begin);
          const MapPart part = {std::span(all).subspan(begin, count), scan.d_inner, begin > 0};
          (absolute ? PartOfAbsMeanMap : PartOfMeanMap)(pool, scan, part, map.data());
        }
        EXPECT_TRUE(Close(map, expected));
      });
    }
  }
}

TEST(HiddenAttention, ChannelMapsAreTheDefinition) {
  ThreadPool pool(2);
  OnEveryShape([&](const ScanParameters& scan, const ReferenceAttention& definition, uint32_t) {
    const std::vector<int32_t> channels = {static_cast<int32_t>(scan.d_inner - 1), 0};
    std::vector<double> expected = definition.ChannelMap(channels[0]);
    const std::vector<double> second = definition.ChannelMap(channels[1]);
    expected.insert(expected.end(), second.begin(), second.end());
    OnEveryTarget([&] { EXPECT_TRUE(Close(Channels(pool, scan, channels), expected)); });
  });
}

TEST(HiddenAttention, ChannelMassIsTheSumOfMagnitudes) {
  ThreadPool pool(2);
  OnEveryShape([&](const ScanParameters& scan, const ReferenceAttention& definition, uint32_t) {
    std::vector<double> expected;
    for (int64_t d = 0; d < scan.d_inner; ++d) {
      double mass = 0;
      for (const double alpha : definition.ChannelMap(d)) mass += std::fabs(alpha);
      expected.push_back(mass);
    }
    OnEveryTarget([&] { EXPECT_TRUE(Close(Mass(pool, scan), expected)); });
  });
}

TEST(HiddenAttention, StateMapsAndDecayMapsAreTheDefinition) {
  ThreadPool pool(2);
  for (const Shape shape : {Shape{1, 2, 3}, Shape{40, 3, 5}, Shape{70, 1, 2}}) {
    const RandomScan random(shape.tokens, shape.d_inner, shape.d_state, 11);
    const ReferenceAttention definition(random.parameters);
    const int32_t channel = static_cast<int32_t>(shape.d_inner) - 1;
    for (int32_t n = 0; n < shape.d_state; ++n) {
      OnEveryTarget([&] {
        EXPECT_TRUE(
            Close(States(pool, random.parameters, channel, {n}), definition.StateMap(n, channel)));
        EXPECT_TRUE(
            Close(Decays(pool, random.parameters, channel, {n}), definition.Decays(n, channel)));
      });
    }
  }
}

TEST(HiddenAttention, StateMapsSumToTheChannelMap) {
  ThreadPool pool(2);
  OnEveryShape([&](const ScanParameters& scan, const ReferenceAttention&, uint32_t) {
    const int32_t channel = static_cast<int32_t>(scan.d_inner / 2);
    const int64_t size = scan.tokens * scan.tokens;
    const std::vector<float> states = States(pool, scan, channel, All(scan.d_state));
    std::vector<double> sum(size);
    for (size_t i = 0; i < states.size(); ++i) sum[i % size] += states[i];
    EXPECT_TRUE(Close(Channels(pool, scan, {channel}), sum));
  });
}

TEST(HiddenAttention, QueryTimesDecayTimesKeySumsToTheChannelMap) {
  ThreadPool pool(2);
  OnEveryShape([&](const ScanParameters& scan, const ReferenceAttention& definition, uint32_t) {
    const int32_t channel = static_cast<int32_t>(scan.d_inner / 2);
    const std::vector<float> H = Decays(pool, scan, channel, All(scan.d_state));
    std::vector<double> sum(scan.tokens * scan.tokens);
    for (int64_t n = 0; n < scan.d_state; ++n) {
      for (int64_t i = 0; i < scan.tokens; ++i) {
        for (int64_t j = 0; j < scan.tokens; ++j) {
          sum[i * scan.tokens + j] += definition.Q(n, i) *
                                      H[(n * scan.tokens + i) * scan.tokens + j] *
                                      definition.K(n, channel, j);
        }
      }
    }
    EXPECT_TRUE(Close(Channels(pool, scan, {channel}), sum));
  });
}

TEST(HiddenAttention, ChannelMapsRebuildTheScan) {
  ThreadPool pool(2);
  for (uint32_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(seed);
    const int64_t tokens = 1 + seed * 7 % 83, channels = 1 + seed % 19, states = 1 + seed % 16;
    const RandomScan random(tokens, channels, states, seed);
    const ScanParameters& scan = random.parameters;
    const std::vector<float> x = reference::Random(tokens * channels, seed);
    std::vector<double> y(tokens * channels);
    for (int64_t d = 0; d < channels; ++d) {
      std::vector<double> state(states);
      for (int64_t i = 0; i < tokens; ++i) {
        const double delta = scan.delta[i * channels + d];
        for (int64_t n = 0; n < states; ++n) {
          state[n] = std::exp(delta * scan.A[n * channels + d]) * state[n] +
                     delta * scan.B[i * scan.bc_stride + n] * x[i * channels + d];
          y[i * channels + d] += scan.C[i * scan.bc_stride + n] * state[n];
        }
      }
    }
    const std::vector<float> alpha = Channels(pool, scan, All(channels));
    std::vector<float> rebuilt(tokens * channels);
    for (int64_t d = 0; d < channels; ++d) {
      for (int64_t i = 0; i < tokens; ++i) {
        double sum = 0;
        for (int64_t j = 0; j < tokens; ++j) {
          sum += double{alpha[(d * tokens + i) * tokens + j]} * x[j * channels + d];
        }
        rebuilt[i * channels + d] = static_cast<float>(sum);
      }
    }
    EXPECT_TRUE(Close(rebuilt, y));
  }
}

TEST(HiddenAttention, TargetRowsAreRowsOfTheChannelMaps) {
  ThreadPool pool(2);
  OnEveryShape([&](const ScanParameters& scan, const ReferenceAttention& definition, uint32_t) {
    for (const int64_t target : {int64_t{0}, scan.tokens / 2, scan.tokens - 1}) {
      SCOPED_TRACE(target);
      std::vector<double> expected(scan.tokens * scan.d_inner);
      for (int64_t d = 0; d < scan.d_inner; ++d) {
        const std::vector<double> alpha = definition.ChannelMap(d);
        for (int64_t j = 0; j < scan.tokens; ++j) {
          expected[j * scan.d_inner + d] = alpha[target * scan.tokens + j];
        }
      }
      OnEveryTarget([&] { EXPECT_TRUE(Close(Rows(pool, scan, target), expected)); });
    }
  });
}

TEST(HiddenAttention, TargetRowsWithoutTargetDecayLeaveOutOneFactorAndTheSelfEntry) {
  ThreadPool pool(2);
  OnEveryShape([&](const ScanParameters& scan, const ReferenceAttention& definition, uint32_t) {
    const int64_t target = scan.tokens - 1;
    std::vector<double> expected(scan.tokens * scan.d_inner);
    for (int64_t j = 0; j < target; ++j) {
      for (int64_t d = 0; d < scan.d_inner; ++d) {
        for (int64_t n = 0; n < scan.d_state; ++n) {
          expected[j * scan.d_inner + d] += definition.Q(n, target) *
                                            definition.Decay(n, d, target - 1, j) *
                                            definition.K(n, d, j);
        }
      }
    }
    EXPECT_TRUE(Close(Rows(pool, scan, target, /*without_target_decay=*/true), expected));
  });
}

TEST(HiddenAttention, AdjointAndForwardAreProductsWithTheMeanMap) {
  ThreadPool pool(2);
  OnEveryShape(
      [&](const ScanParameters& scan, const ReferenceAttention& definition, uint32_t seed) {
        const std::vector<float> v = reference::Random(scan.tokens, seed);
        const std::vector<int32_t> some = {static_cast<int32_t>(scan.d_inner - 1), 0,
                                           static_cast<int32_t>(scan.d_inner / 2)};
        for (const std::vector<int32_t>& channels : {std::vector<int32_t>(), some}) {
          const std::vector<double> map =
              definition.Mean(channels.empty() ? All(scan.d_inner) : channels);
          OnEveryTarget([&] {
            EXPECT_TRUE(Close(Adjoint(pool, scan, channels, v), RowTimesMap(v, map)));
            EXPECT_TRUE(Close(Forward(pool, scan, channels, v), MapTimesColumn(map, v)));
          });
        }
      });
}

TEST(HiddenAttention, AdjointAndForwardAreTransposesAndMatchTheMap) {
  ThreadPool pool(2);
  for (uint32_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(seed);
    const int64_t tokens = 1 + seed * 37 % 300, channels = 1 + seed * 5 % 40;
    const RandomScan random(tokens, channels, 1 + seed % 17, seed);
    const ScanParameters& scan = random.parameters;
    const std::vector<float> v = reference::Random(tokens, 2 * seed);
    const std::vector<float> w = reference::Random(tokens, 2 * seed + 1);
    const std::vector<float> adjoint = Adjoint(pool, scan, {}, v);
    const std::vector<float> forward = Forward(pool, scan, {}, w);
    double magnitude = 0.1;
    for (int64_t i = 0; i < tokens; ++i) magnitude += std::fabs(double{v[i]} * forward[i]);
    EXPECT_NEAR(Dot(adjoint, w), Dot(v, forward), 5e-5 * magnitude);
    const std::vector<double> map = Doubles(Mean(pool, scan));
    EXPECT_TRUE(Close(adjoint, RowTimesMap(v, map)));
    EXPECT_TRUE(Close(forward, MapTimesColumn(map, w)));
  }
}

TEST(HiddenAttention, InputAndOutputOfAProductMayBeTheSame) {
  ThreadPool pool(2);
  const RandomScan random(50, 20, 4, 3);
  const std::vector<float> v = reference::Random(50, 4);
  std::vector<float> adjoint = v, forward = v;
  MeanAdjoint(pool, random.parameters, {}, adjoint.data(), adjoint.data());
  MeanForward(pool, random.parameters, {}, forward.data(), forward.data());
  EXPECT_TRUE(SameBits(adjoint, Adjoint(pool, random.parameters, {}, v)));
  EXPECT_TRUE(SameBits(forward, Forward(pool, random.parameters, {}, v)));
}

TEST(HiddenAttention, ThreadsDoNotChangeABit) {
  ThreadPool one(1), many(3);
  for (const Shape shape : {Shape{300, 70, 16}, Shape{129, 33, 5}, Shape{17, 1, 2}}) {
    const RandomScan random(shape.tokens, shape.d_inner, shape.d_state, 5);
    const ScanParameters& scan = random.parameters;
    const std::vector<float> v = reference::Random(shape.tokens, 6);
    const std::vector<int32_t> first = {0};
    EXPECT_TRUE(SameBits(Mean(one, scan), Mean(many, scan)));
    EXPECT_TRUE(SameBits(AbsMean(one, scan), AbsMean(many, scan)));
    EXPECT_TRUE(SameBits(MeanOf(one, scan, first), MeanOf(many, scan, first)));
    EXPECT_TRUE(SameBits(Mass(one, scan), Mass(many, scan)));
    EXPECT_TRUE(SameBits(Channels(one, scan, first), Channels(many, scan, first)));
    EXPECT_TRUE(SameBits(States(one, scan, 0, {0, 1}), States(many, scan, 0, {0, 1})));
    EXPECT_TRUE(SameBits(Decays(one, scan, 0, {0, 1}), Decays(many, scan, 0, {0, 1})));
    EXPECT_TRUE(SameBits(Rows(one, scan, 9), Rows(many, scan, 9)));
    EXPECT_TRUE(SameBits(Adjoint(one, scan, {}, v), Adjoint(many, scan, {}, v)));
    EXPECT_TRUE(SameBits(Forward(one, scan, {}, v), Forward(many, scan, {}, v)));
  }
}

TEST(HiddenAttention, MapsOfLaterTokensDoNotChangeEarlierRows) {
  ThreadPool pool(2);
  const RandomScan random(200, 6, 4, 8);
  const std::vector<float> whole = Mean(pool, random.parameters);
  ScanParameters head = random.parameters;
  head.tokens = 131;
  const std::vector<float> part = Mean(pool, head);
  for (int64_t i = 0; i < head.tokens; ++i) {
    for (int64_t j = 0; j < head.tokens; ++j) {
      ASSERT_EQ(part[i * head.tokens + j], whole[i * 200 + j]) << i << ", " << j;
    }
  }
}

TEST(HiddenAttention, DecayThatUnderflowsLeavesTheDiagonalAlone) {
  ThreadPool pool(2);
  RandomScan random(140, 20, 3, 9);
  std::fill(random.delta.begin(), random.delta.end(), 100.0f);
  std::fill(random.A.begin(), random.A.end(), -100.0f);  // exp(-1e4) for every step
  const ScanParameters& scan = random.parameters;
  OnEveryTarget([&] {
    const std::vector<float> mean = Mean(pool, scan), absolute = AbsMean(pool, scan);
    for (int64_t i = 0; i < scan.tokens; ++i) {
      double self = 0;
      for (int64_t n = 0; n < scan.d_state; ++n) {
        self += 100.0 * scan.B[i * scan.bc_stride + n] * scan.C[i * scan.bc_stride + n];
      }
      for (int64_t j = 0; j < scan.tokens; ++j) {
        const double expected = i == j ? self : 0;
        ASSERT_NEAR(mean[i * scan.tokens + j], expected, 1e-2) << i << ", " << j;
        ASSERT_NEAR(absolute[i * scan.tokens + j], std::fabs(expected), 1e-2) << i << ", " << j;
        if (i != j) {
          ASSERT_LT(std::fabs(mean[i * scan.tokens + j]), 1e-30);
        }
      }
    }
    for (const float value : Mass(pool, scan)) EXPECT_TRUE(std::isfinite(value));
    const std::vector<float> v(scan.tokens, 1.0f);
    for (const float value : Adjoint(pool, scan, {}, v)) EXPECT_TRUE(std::isfinite(value));
    for (const float value : Forward(pool, scan, {}, v)) EXPECT_TRUE(std::isfinite(value));
    for (const float value : Rows(pool, scan, 139)) EXPECT_TRUE(std::isfinite(value));
  });
}

TEST(HiddenAttention, MixedFastAndSlowDecaysStayAccurate) {
  ThreadPool pool(2);
  for (uint32_t seed = 1; seed <= 5; ++seed) {
    const RandomScan random(270, 18, 16, seed, /*slowest=*/1e-6f, /*fastest=*/1e3f);
    const ReferenceAttention definition(random.parameters);
    EXPECT_TRUE(Close(Mean(pool, random.parameters), definition.Mean(All(18))));
    EXPECT_TRUE(Close(AbsMean(pool, random.parameters), definition.Mean(All(18), true)));
  }
}

TEST(HiddenAttention, StepsOfZeroGiveAMapOfZeros) {
  ThreadPool pool(2);
  RandomScan random(40, 5, 4, 10);
  std::fill(random.delta.begin(), random.delta.end(), 0.0f);
  const std::vector<float> zeros(40 * 40);
  EXPECT_EQ(Mean(pool, random.parameters), zeros);
  EXPECT_EQ(AbsMean(pool, random.parameters), zeros);
  EXPECT_EQ(Mass(pool, random.parameters), std::vector<float>(5));
  const std::vector<float> decay = Decays(pool, random.parameters, 0, {0});
  for (int64_t i = 0; i < 40; ++i) {
    for (int64_t j = 0; j < 40; ++j) EXPECT_EQ(decay[i * 40 + j], j <= i ? 1.0f : 0.0f);
  }
}

TEST(HiddenAttention, OneTokenAttendsToItself) {
  ThreadPool pool(2);
  const RandomScan random(1, 3, 2, 12);
  const ScanParameters& scan = random.parameters;
  const float self = scan.C[0] * scan.B[0] + scan.C[1] * scan.B[1];
  EXPECT_NEAR(Channels(pool, scan, {1})[0], self * scan.delta[1], 1e-6);
  EXPECT_NEAR(Mean(pool, scan)[0], self * (scan.delta[0] + scan.delta[1] + scan.delta[2]) / 3,
              1e-6);
}

}  // namespace
}  // namespace mambascope::kernels
