#include "server/kernels/delta_gradient.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "server/kernels/selective_scan.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::OnEveryTarget;
using reference::Random;
using reference::SameBits;

// dt over everything that softplus tells apart; the size is no multiple of a register.
std::vector<float> Steps() {
  std::vector<float> dt;
  for (float v = -30; v < 40; v += 0.037f) dt.push_back(v);
  dt.push_back(300);
  return dt;
}

TEST(SoftplusGradient, IsTheSlopeOfSoftplus) {
  const std::vector<float> dt = Steps(), gradient = Random(dt.size(), 1);
  OnEveryTarget([&] {
    ThreadPool pool(1);
    std::vector<float> delta(dt.size()), ddt = gradient;
    Softplus(pool, dt, delta);
    SoftplusGradient(pool, delta, ddt);
    for (size_t i = 0; i < dt.size(); ++i) {
      const double expected = gradient[i] * -std::expm1(-double{delta[i]});
      EXPECT_NEAR(ddt[i], expected, 1e-6 * std::abs(expected)) << "dt " << dt[i];
      const double slope = gradient[i] * reference::Sigmoid(dt[i]);
      EXPECT_NEAR(ddt[i], slope, 2e-6 * std::abs(slope)) << "dt " << dt[i];
    }
  });
}

TEST(SoftplusGradient, BitsDoNotDependOnThreads) {
  const std::vector<float> delta = Random(100'003, 2, 0, 3), gradient = Random(100'003, 3);
  std::vector<float> one = gradient, five = gradient;
  ThreadPool alone(1), pool(5);
  SoftplusGradient(alone, delta, one);
  SoftplusGradient(pool, delta, five);
  EXPECT_TRUE(SameBits(five, one));
}

TEST(SsdDeltaGradient, IsZeroWhereTheClampHolds) {
  constexpr int64_t kTokens = 300, kHeads = 21, kStride = kHeads + 3;
  constexpr float kLow = 0.1f, kHigh = 1.5f;
  const std::vector<float> dt = Random(kTokens * kStride, 4, -6, 3), bias = Random(kHeads, 5);
  const std::vector<float> ddelta = Random(kTokens * kHeads, 6);
  std::vector<float> first;
  OnEveryTarget([&] {
    for (const int threads : {1, 5}) {
      ThreadPool pool(threads);
      std::vector<float> ddt(kTokens * kStride, 12345.0f);
      SsdDeltaGradient(pool, dt.data(), kStride, bias.data(), kLow, kHigh, kTokens, kHeads,
                       ddelta.data(), ddt.data(), kStride);
      for (int64_t i = 0; i < kTokens; ++i) {
        for (int64_t h = 0; h < kStride; ++h) {
          const float actual = ddt[i * kStride + h];
          if (h >= kHeads) {
            EXPECT_EQ(actual, 12345.0f);
            continue;
          }
          const double v = double{dt[i * kStride + h]} + bias[h], delta = reference::Softplus(v);
          const double slope = kLow < delta && delta < kHigh ? reference::Sigmoid(v) : 0.0;
          const double expected = slope * ddelta[i * kHeads + h];
          EXPECT_NEAR(actual, expected, 2e-6 * std::abs(expected)) << i << ", " << h;
        }
      }
    }
  });
}

TEST(SsdDeltaGradient, MayOverwriteItsInput) {
  const std::vector<float> dt = Random(40 * 5, 7, -6, 3), bias = Random(5, 8);
  std::vector<float> ddelta = Random(40 * 5, 9), ddt(40 * 5);
  ThreadPool pool(2);
  const auto to = [&](float* out) {
    SsdDeltaGradient(pool, dt.data(), 5, bias.data(), 0.01f, 1.0f, 40, 5, ddelta.data(), out, 5);
  };
  to(ddt.data());
  to(ddelta.data());
  EXPECT_TRUE(SameBits(ddelta, ddt));
}

}  // namespace
}  // namespace mambascope::kernels
