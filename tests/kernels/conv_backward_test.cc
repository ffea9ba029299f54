#include "server/kernels/conv_backward.h"

#include <cstdint>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "server/kernels/causal_conv1d.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::Random;
using reference::SameBits;

constexpr Activation kActivations[] = {Activation::kSilu, Activation::kRelu, Activation::kIdentity};
constexpr BackwardRule kRules[] = {BackwardRule::kGradient, BackwardRule::kRelevance};

// f(c) / c, or f'(c) by a central difference; neither is asked at ReLU's corner.
double Slope(Activation activation, BackwardRule rule, double c) {
  if (rule == BackwardRule::kRelevance) return reference::Activate(activation, c) / c;
  const double step = 1e-5;
  return (reference::Activate(activation, c + step) - reference::Activate(activation, c - step)) /
         (2 * step);
}

std::vector<float> OfActivation(const std::vector<float>& c, const std::vector<float>& dx,
                                int64_t channels, Activation activation, BackwardRule rule,
                                int threads = 1) {
  ThreadPool pool(threads);
  std::vector<float> dc(c.size(), std::nanf(""));
  ActivationGradient(pool, c.data(), dx.data(), static_cast<int64_t>(c.size()) / channels, channels,
                     activation, rule, dc.data());
  return dc;
}

TEST(ActivationGradient, IsTheDerivativeOrTheRatioTimesTheGradient) {
  OnEveryTarget([] {
    for (const int64_t channels : {1, 3, 8, 15, 16, 17, 100}) {
      const std::vector<float> c = Random(7 * channels, 1, -20, 20), dx = Random(7 * channels, 2);
      for (const Activation activation : kActivations) {
        for (const BackwardRule rule : kRules) {
          std::vector<double> expected;
          for (size_t i = 0; i < c.size(); ++i) {
            expected.push_back(dx[i] * Slope(activation, rule, c[i]));
          }
          EXPECT_TRUE(Close(OfActivation(c, dx, channels, activation, rule), expected));
        }
      }
    }
  });
}

TEST(ActivationGradient, IsDefinedAtZeroAndKeepsItsSenseFarOut) {
  const std::vector<float> c = {0, -0.0f, 200, -200, 1e30f, -1e30f}, ones(c.size(), 1.0f);
  const auto of = [&](Activation activation, BackwardRule rule) {
    return OfActivation(c, ones, 1, activation, rule);
  };
  using Numbers = std::vector<float>;
  EXPECT_EQ(of(Activation::kRelu, kRules[0]), (Numbers{0, 0, 1, 0, 1, 0}));
  EXPECT_EQ(of(Activation::kRelu, kRules[1]), (Numbers{0, 0, 1, 0, 1, 0}));
  EXPECT_EQ(of(Activation::kIdentity, kRules[0]), ones);
  for (const BackwardRule rule : kRules) {
    const Numbers slope = of(Activation::kSilu, rule), expected = {0.5f, 0.5f, 1, 0, 1, 0};
    for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(slope[i], expected[i], 1e-6) << i;
    EXPECT_EQ(slope[4], 1.0f);
  }
}

TEST(ActivationGradient, HasTheSameBitsInPlaceOnAnyThreadsAndForEachRowAlone) {
  const int64_t tokens = 200, channels = 130;
  const std::vector<float> c = Random(tokens * channels, 3, -5, 5);
  const std::vector<float> dx = Random(tokens * channels, 4);
  const BackwardRule rule = BackwardRule::kGradient;
  const std::vector<float> dc = OfActivation(c, dx, channels, Activation::kSilu, rule);
  for (const int threads : {2, 5}) {
    EXPECT_TRUE(SameBits(OfActivation(c, dx, channels, Activation::kSilu, rule, threads), dc));
  }
  ThreadPool pool(2);
  std::vector<float> over_dx = dx, over_c = c;
  ActivationGradient(pool, c.data(), over_dx.data(), tokens, channels, Activation::kSilu, rule,
                     over_dx.data());
  EXPECT_TRUE(SameBits(over_dx, dc));
  ActivationGradient(pool, over_c.data(), dx.data(), tokens, channels, Activation::kSilu, rule,
                     over_c.data());
  EXPECT_TRUE(SameBits(over_c, dc));
  for (int64_t i = 0; i < tokens; ++i) {
    std::vector<float> row(channels);
    ActivationGradient(pool, c.data() + i * channels, dx.data() + i * channels, 1, channels,
                       Activation::kSilu, rule, row.data());
    ASSERT_TRUE(SameBits(row, std::span(dc).subspan(i * channels, channels)));
  }
}

struct Conv {
  Conv(int64_t tokens, int64_t channels, int64_t taps)
      : tokens(tokens),
        channels(channels),
        taps(taps),
        dc(Random(tokens * channels, 1)),
        weight(Random(channels * taps, 2)) {}
  ConvBackwardInputs Inputs() const { return {tokens, channels, taps, dc.data(), weight.data()}; }
  std::vector<float> Run(int threads = 1) const {
    ThreadPool pool(threads);
    std::vector<float> dx_in(tokens * channels, std::nanf(""));
    CausalConv1dBackward(pool, Inputs(), dx_in.data(), channels);
    return dx_in;
  }
  std::vector<double> Expected() const {
    std::vector<double> dx_in(tokens * channels);
    for (int64_t j = 0; j < tokens; ++j) {
      for (int64_t d = 0; d < channels; ++d) {
        for (int64_t k = 0; k < taps && j + k < tokens; ++k) {
          dx_in[j * channels + d] +=
              double{weight[d * taps + taps - 1 - k]} * dc[(j + k) * channels + d];
        }
      }
    }
    return dx_in;
  }

  int64_t tokens, channels, taps;
  std::vector<float> dc, weight;
};

TEST(CausalConv1dBackward, EqualsTheSum) {
  OnEveryTarget([] {
    for (const int64_t tokens : {1, 2, 3, 5, 9, 40}) {
      for (const int64_t channels : {1, 7, 16, 17, 100}) {
        for (const int64_t taps : {1, 2, 3, 4, 6}) {
          const Conv conv(tokens, channels, taps);
          EXPECT_TRUE(Close(conv.Run(), conv.Expected()))
              << tokens << " tokens, " << channels << " channels, " << taps << " taps";
        }
      }
    }
  });
}

// dc . conv(v) = convᵀ(dc) . v, as the convolution is linear: with the kernel that runs forward.
TEST(CausalConv1dBackward, IsTheAdjointOfTheConvolution) {
  ThreadPool pool(2);
  const Conv conv(50, 37, 4);
  const std::vector<float> v = Random(50 * 37, 3);
  std::vector<float> c(50 * 37), state(3 * 37);
  float* const states[] = {state.data()};
  const std::vector<int32_t> seq_start = {0, 50};
  CausalConv1d(pool,
               {.x_in = v.data(),
                .x_stride = 37,
                .channels = 37,
                .taps = 4,
                .weight = conv.weight.data(),
                .activation = Activation::kIdentity,
                .seq_start = seq_start},
               {.x = c.data(), .conv_state = states});
  const std::vector<float> dx_in = conv.Run();
  double forward = 0, backward = 0;
  for (size_t i = 0; i < v.size(); ++i) {
    forward += double{conv.dc[i]} * c[i];
    backward += double{dx_in[i]} * v[i];
  }
  EXPECT_NEAR(forward, backward, 1e-4);
}

TEST(CausalConv1dBackward, WritesIntoWiderRows) {
  ThreadPool pool(2);
  const Conv conv(30, 21, 4);
  const int64_t stride = 45;
  const std::vector<float> dense = conv.Run(), before = Random(30 * stride, 5);
  std::vector<float> replaced = before;
  CausalConv1dBackward(pool, conv.Inputs(), replaced.data(), stride);
  for (int64_t j = 0; j < 30; ++j) {
    for (int64_t d = 0; d < stride; ++d) {
      const float was = before[j * stride + d];
      EXPECT_EQ(replaced[j * stride + d], d < 21 ? dense[j * 21 + d] : was);
    }
  }
}

TEST(CausalConv1dBackward, HasTheSameBitsOnAnyThreadsAndWithoutEarlierTokens) {
  const Conv conv(333, 130, 4);
  const std::vector<float> all = conv.Run();
  for (const int threads : {2, 5}) EXPECT_TRUE(SameBits(conv.Run(threads), all));
  ThreadPool pool(1);
  for (const int64_t first : {1, 200, 329, 332}) {
    ConvBackwardInputs in = conv.Inputs();
    in.tokens -= first;
    in.dc += first * 130;
    std::vector<float> tail(in.tokens * 130);
    CausalConv1dBackward(pool, in, tail.data(), 130);
    EXPECT_TRUE(SameBits(tail, std::span(all).subspan(first * 130)));
  }
}

}  // namespace
}  // namespace mambascope::kernels
