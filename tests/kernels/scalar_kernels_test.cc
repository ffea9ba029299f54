// The plain reference is made of the bodies that the device kernels run; here it meets the Highway
// kernels, on every instruction set of this machine.
#include "tests/support/scalar_kernels.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "server/base/thread_pool.h"
#include "server/kernels/math_body.h"
#include "server/kernels/rms_norm.h"
#include "server/kernels/scan_body.h"
#include "server/kernels/split_body.h"
#include "server/kernels/sum_body.h"
#include "tests/support/kernel_problems.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::ConvProblem;
using reference::InputsOf;
using reference::MapProblem;
using reference::OnEveryTarget;
using reference::Pointers;
using reference::Random;
using reference::SameBits;
using reference::ScanProblem;
using reference::SsdProblem;
using reference::Wide;

ThreadPool& Pool() {
  static ThreadPool pool(2);
  return pool;
}

// AVX-512 has functions of its own, and older targets no fused multiply-add.
bool HasTheBodiesFormulas() {
  return (hwy::SupportedTargets() & (HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL)) == HWY_AVX2;
}

TEST(Reference, SoftplusHasTheBitsOfTheVectorOne) {
  std::vector<float> dt =
      Random(20000, 1, -86, 100);  // below, subnormal steps, which the pool flushes
  for (const float v : {0.0f, -0.0f, 1e-30f, -1e-30f, 87.5f, 1e30f}) dt.push_back(v);
  std::vector<float> bodies;
  for (const float v : dt) bodies.push_back(body::Softplus(v));
  OnEveryTarget([&] {
    std::vector<float> delta(dt.size());
    Softplus(Pool(), dt, delta);
    if (HasTheBodiesFormulas()) {
      EXPECT_TRUE(SameBits(delta, bodies));
    } else {
      EXPECT_TRUE(Close(delta, Wide(bodies)));
    }
  });
}

TEST(Reference, FunctionsAreNearTheExactOnes) {
  for (double v = -80; v <= 80; v += 0.0137) {
    const float f = static_cast<float>(v);
    EXPECT_NEAR(body::Silu(f) / reference::Silu(f), 1, 6e-7) << v;
    EXPECT_NEAR(body::Softplus(f) / reference::Softplus(f), 1, 5e-7) << v;
    if (f <= 0) {
      EXPECT_NEAR(body::Exp2NonPositive(f) / std::exp2(double{f}), 1, 3e-7) << v;
    }
  }
}

TEST(Reference, NotANumberStaysOne) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const float all_bits = BitsAs<float>(0x7fffffffu);  // what a device makes
  for (const float nan : {kNan, -kNan, all_bits}) {
    EXPECT_TRUE(std::isnan(body::Exp2NonPositive(nan)));
    EXPECT_TRUE(std::isnan(body::Softplus(nan)));
    EXPECT_TRUE(std::isnan(body::Silu(nan)));
    EXPECT_TRUE(std::isnan(body::Activate(Activation::kRelu, nan)));
    EXPECT_TRUE(std::isnan(body::ClampedDelta(nan, 0, 0, 1)));
  }
}

TEST(Reference, ThreeBf16PartsAddUpToTheNumber) {
  for (const float v : Random(10000, 2, -1e5f, 1e5f)) {
    const body::Bf16Parts parts = body::SplitInParts(v);
    EXPECT_EQ(double{body::WideBf16(parts.high)} + body::WideBf16(parts.middle) +
                  body::WideBf16(parts.low),
              v);
  }
  EXPECT_EQ(body::NearestBf16(BitsAs<float>(0x3f808000u)), 0x3f80);  // ties go to even
  EXPECT_EQ(body::NearestBf16(BitsAs<float>(0x3f818000u)), 0x3f82);
  EXPECT_TRUE(std::isnan(body::WideBf16(body::NearestBf16(BitsAs<float>(0x7fffffffu)))));
}

TEST(Reference, StepsComposeAsOneStep) {
  const body::ScanStep first = body::Discretize(0.3f, -1.5f, 0.7f, -2.0f);
  const body::ScanStep second = body::Discretize(0.1f, -0.2f, -0.4f, 1.0f);
  EXPECT_NEAR(body::Advance(body::Then(first, second), 5.0f),
              body::Advance(second, body::Advance(first, 5.0f)), 1e-6);
}

TEST(Reference, EveryStateHasOnePlaceInTheLanes) {
  for (const int64_t d_state : {1, 8, 16, 17, 33, 64, 100, 128, 256}) {
    const int per_lane = body::StatesPerLane(d_state);
    std::vector<int> seen(per_lane * body::kLanes);
    for (int lane = 0; lane < body::kLanes; ++lane) {
      for (int s = 0; s < per_lane; ++s) ++seen[body::StateOf(lane, s, per_lane, body::kLanes)];
    }
    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1)) << d_state;
  }
}

TEST(Reference, ConvolutionEqualsTheVectorOne) {
  for (const int64_t taps : {1, 2, 4, 7}) {
    for (const Activation f : {Activation::kSilu, Activation::kRelu, Activation::kIdentity}) {
      const ConvProblem p({5, 1, 40, 2}, 21, taps, 3);
      OnEveryTarget([&] {
        auto vector_states = p.states, states = p.states;
        std::vector<float> vector_x(p.tokens * p.channels), x = vector_x;
        const auto vector_pointers = Pointers(vector_states), pointers = Pointers(states);
        CausalConv1d(Pool(), InputsOf(p, f), {vector_x.data(), vector_pointers});
        scalar::CausalConv1d(InputsOf(p, f), {x.data(), pointers});
        EXPECT_TRUE(Close(x, Wide(vector_x)));
        EXPECT_EQ(states, vector_states);
      });
    }
  }
}

TEST(Reference, SelectiveScanEqualsTheVectorOne) {
  for (const int64_t d_state : {1, 16, 24, 64}) {
    const ScanProblem p({30, 1, 17}, 19, d_state, 5);
    OnEveryTarget([&] {
      auto vector_states = p.states, states = p.states;
      std::vector<float> vector_gated(p.x.size()), vector_y = vector_gated, gated = vector_gated,
                                                   y = vector_gated;
      const auto vector_pointers = Pointers(vector_states), pointers = Pointers(states);
      SelectiveScan(Pool(), InputsOf(p), {vector_gated.data(), vector_y.data(), vector_pointers});
      scalar::SelectiveScan(InputsOf(p), {gated.data(), y.data(), pointers});
      EXPECT_TRUE(Close(gated, Wide(vector_gated)));
      EXPECT_TRUE(Close(y, Wide(vector_y)));
      for (size_t s = 0; s < states.size(); ++s) {
        EXPECT_TRUE(Close(states[s], Wide(vector_states[s])));
      }
    });
  }
}

TEST(Reference, SsdScanEqualsTheVectorOne) {
  for (const int64_t d_state : {3, 16, 40}) {
    const SsdProblem p({20, 1, 9}, {6, 5, 2, d_state}, 7);
    OnEveryTarget([&] {
      auto vector_states = p.states, states = p.states;
      std::vector<float> vector_gated(p.tokens * p.channels),
          vector_y = vector_gated, gated = vector_gated, y = vector_gated;
      const auto vector_pointers = Pointers(vector_states), pointers = Pointers(states);
      SsdScan(Pool(), InputsOf(p), {vector_gated.data(), vector_y.data(), vector_pointers});
      scalar::SsdScan(InputsOf(p), {gated.data(), y.data(), pointers});
      EXPECT_TRUE(Close(gated, Wide(vector_gated)));
      EXPECT_TRUE(Close(y, Wide(vector_y)));
      for (size_t s = 0; s < states.size(); ++s) {
        EXPECT_TRUE(Close(states[s], Wide(vector_states[s])));
      }
    });
  }
}

TEST(Reference, NormsEqualTheVectorOnes) {
  for (const int64_t cols : {1, 7, 768, 2050}) {
    constexpr int64_t kRows = 3, kGroups = 2;
    const std::vector<float> h = Random(kRows * cols * kGroups, 9);
    const std::vector<float> weight = Random(cols * kGroups, 10);
    OnEveryTarget([&] {
      std::vector<float> expected(h.size()), actual(h.size());
      GroupRmsNorm(Pool(), h.data(), weight.data(), 1e-5f, kRows, cols * kGroups, kGroups,
                   expected.data());
      scalar::RmsNorm(h.data(), weight.data(), 1e-5f, kRows, cols * kGroups, kGroups,
                      cols * kGroups, actual.data());
      EXPECT_TRUE(Close(actual, Wide(expected)));

      expected = actual = h;  // in rows twice as long as what is scaled
      RmsScaleInPlace(Pool(), expected.data(), kRows, cols, cols * kGroups, 1e-6f);
      scalar::RmsNorm(actual.data(), nullptr, 1e-6f, kRows, cols, 1, cols * kGroups, actual.data());
      EXPECT_TRUE(Close(actual, Wide(expected)));
    });
  }
}

TEST(Reference, AdjointAndForwardScansEqualTheVectorOnes) {
  const MapProblem p(33, 70, 16, 11);
  const ScanParameters scan = p.Parameters();
  const std::vector<float> v = Random(p.tokens, 12);
  std::vector<float> target(p.tokens * p.d_inner, 0.0f);  // e_20 in every channel
  std::fill_n(target.begin() + 20 * p.d_inner, p.d_inner, 1.0f);
  OnEveryTarget([&] {
    std::vector<float> expected_rows(p.tokens * p.d_inner), rows = expected_rows;
    std::vector<float> expected(p.tokens), actual(p.tokens);
    TargetRows(Pool(), scan, 20, false, expected_rows.data());
    scalar::AdjointScan(scan, target.data(), p.d_inner, true, rows.data());
    EXPECT_TRUE(Close(rows, Wide(expected_rows)));

    MeanAdjoint(Pool(), scan, {}, v.data(), expected.data());
    scalar::AdjointScan(scan, v.data(), 1, false, rows.data());
    scalar::RowMeans(rows.data(), p.tokens, p.d_inner, actual.data());
    EXPECT_TRUE(Close(actual, Wide(expected)));

    MeanForward(Pool(), scan, {}, v.data(), expected.data());
    scalar::ForwardScan(scan, v.data(), rows.data());
    scalar::RowMeans(rows.data(), p.tokens, p.d_inner, actual.data());
    EXPECT_TRUE(Close(actual, Wide(expected)));
  });
}

}  // namespace
}  // namespace mambascope::kernels
