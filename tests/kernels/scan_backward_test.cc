#include "server/kernels/scan_backward.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/reference_attention.h"
#include "tests/support/reference_backward.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::Random;
using reference::RandomScan;
using reference::SameBits;
using reference::Widen;

struct Shape {
  int64_t tokens, d_inner, d_state;
};

// Around the kernels' chunks of 16 tokens, groups of 64 channels and blocks of 16, 4 and 1 states.
const Shape kShapes[] = {{1, 1, 1},    {1, 70, 16},   {2, 17, 5},  {15, 64, 16},
                         {16, 65, 4},  {17, 3, 21},   {63, 33, 5}, {64, 130, 3},
                         {65, 16, 64}, {200, 20, 16}, {200, 9, 1}, {33, 5, 256}};

constexpr float kUntouched = 12345.0f;

std::vector<double> Wide(const std::vector<float>& v) { return {v.begin(), v.end()}; }

std::vector<float> Adjoint(const ScanParameters& scan, const std::vector<float>& dy,
                           int threads = 1) {
  ThreadPool pool(threads);
  std::vector<float> dx(dy.size() + 1, kUntouched);
  ScanAdjoint(pool, scan, dy.data(), dx.data(), /*accumulate=*/false);
  EXPECT_EQ(dx.back(), kUntouched);
  dx.pop_back();
  return dx;
}

TEST(ScanAdjoint, EqualsTheFormulaInDouble) {
  for (const auto [tokens, d_inner, d_state] : kShapes) {
    SCOPED_TRACE(testing::Message() << tokens << " x " << d_inner << " x " << d_state);
    const RandomScan scan(tokens, d_inner, d_state, /*seed=*/1);
    const std::vector<float> x = Random(tokens * d_inner, 2), dy = Random(tokens * d_inner, 3);
    const auto expected = ScanBackward(Widen(scan.parameters, x), Wide(dy));
    OnEveryTarget([&] { EXPECT_TRUE(Close(Adjoint(scan.parameters, dy), expected.dx)); });
  }
}

TEST(ScanAdjoint, IsTheTransposeOfTheScan) {  // sum dy y = sum x dx
  for (const auto [tokens, d_inner, d_state] : kShapes) {
    const RandomScan scan(tokens, d_inner, d_state, /*seed=*/4);
    const std::vector<float> x = Random(tokens * d_inner, 5), dy = Random(tokens * d_inner, 6);
    const std::vector<double> y = ScanForward(Widen(scan.parameters, x));
    const std::vector<float> dx = Adjoint(scan.parameters, dy);
    double there = 0, back = 0, scale = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      there += dy[i] * y[i];
      back += double{x[i]} * dx[i];
      scale += std::abs(dy[i] * y[i]);
    }
    EXPECT_NEAR(there, back, 1e-5 * scale);
  }
}

TEST(ScanAdjoint, FromOneTokenIsTheTargetRow) {
  const RandomScan scan(100, 70, 16, /*seed=*/7);
  ThreadPool pool(1);
  for (const int64_t target : {0, 15, 50, 99}) {
    std::vector<float> dy(100 * 70), rows(100 * 70);
    std::fill_n(dy.begin() + target * 70, 70, 1.0f);
    TargetRows(pool, scan.parameters, target, /*without_target_decay=*/false, rows.data());
    EXPECT_TRUE(Close(Adjoint(scan.parameters, dy), Wide(rows)));
  }
}

TEST(ScanAdjoint, AddsWhereAsked) {
  const RandomScan scan(40, 19, 6, /*seed=*/8);
  const std::vector<float> dy = Random(40 * 19, 9), before = Random(40 * 19, 10);
  std::vector<float> sum = before, expected = Adjoint(scan.parameters, dy);
  for (size_t i = 0; i < sum.size(); ++i) expected[i] += before[i];
  ThreadPool pool(1);
  ScanAdjoint(pool, scan.parameters, dy.data(), sum.data(), /*accumulate=*/true);
  EXPECT_TRUE(SameBits(sum, expected));
}

TEST(ScanAdjoint, MayOverwriteItsInput) {
  const RandomScan scan(40, 19, 6, /*seed=*/8);
  std::vector<float> dy = Random(40 * 19, 9);
  const std::vector<float> expected = Adjoint(scan.parameters, dy);
  ThreadPool pool(2);
  ScanAdjoint(pool, scan.parameters, dy.data(), dy.data(), /*accumulate=*/false);
  EXPECT_TRUE(SameBits(dy, expected));
}

TEST(ScanAdjoint, BitsDoNotDependOnThreads) {
  const RandomScan scan(70, 333, 16, /*seed=*/11);
  const std::vector<float> dy = Random(70 * 333, 12);
  const std::vector<float> one = Adjoint(scan.parameters, dy, 1);
  EXPECT_TRUE(SameBits(Adjoint(scan.parameters, dy, 2), one));
  EXPECT_TRUE(SameBits(Adjoint(scan.parameters, dy, 5), one));
}

}  // namespace
}  // namespace mambascope::kernels
