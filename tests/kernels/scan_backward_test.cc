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

// Around the kernels' chunks of 8 tokens, groups of 128 and blocks of 256 channels, and blocks of
// 16, 4 and 1 states.
const Shape kShapes[] = {{1, 1, 1},   {1, 70, 16},  {2, 17, 5},   {15, 64, 16}, {16, 65, 4},
                         {17, 3, 21}, {63, 33, 5},  {64, 130, 3}, {65, 16, 64}, {200, 20, 16},
                         {200, 9, 1}, {33, 5, 256}, {9, 300, 2},  {25, 129, 17}};

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

struct Gradients {
  std::vector<float> dx, ddelta, dB, dC;
};

// B and C as their gradients stand in one array, with other numbers around them.
Gradients Backward(const ScanParameters& scan, const std::vector<float>& x,
                   const std::vector<float>& dy, int threads = 1) {
  ThreadPool pool(threads);
  const int64_t N = scan.d_state, stride = 2 * N + 3;
  std::vector<float> dx(x.size() + 1, kUntouched), ddelta(dx),
      dbc(scan.tokens * stride, kUntouched);
  ScanBackward(pool, scan, x.data(), dy.data(),
               {.dx = dx.data(),
                .accumulate_dx = false,
                .ddelta = ddelta.data(),
                .dB = dbc.data() + 1,
                .dC = dbc.data() + 2 + N,
                .bc_stride = stride});
  Gradients out;
  for (int64_t i = 0; i < scan.tokens; ++i) {
    const auto row = dbc.begin() + i * stride;
    for (const int64_t between : {int64_t{0}, N + 1, 2 * N + 2})
      EXPECT_EQ(row[between], kUntouched);
    out.dB.insert(out.dB.end(), row + 1, row + 1 + N);
    out.dC.insert(out.dC.end(), row + 2 + N, row + 2 + 2 * N);
  }
  EXPECT_EQ(dx.back(), kUntouched);
  EXPECT_EQ(ddelta.back(), kUntouched);
  out.dx.assign(dx.begin(), dx.end() - 1);
  out.ddelta.assign(ddelta.begin(), ddelta.end() - 1);
  return out;
}

TEST(ScanBackward, EqualsTheFormulasInDouble) {
  for (const auto [tokens, d_inner, d_state] : kShapes) {
    SCOPED_TRACE(testing::Message() << tokens << " x " << d_inner << " x " << d_state);
    const RandomScan scan(tokens, d_inner, d_state, /*seed=*/21);
    const std::vector<float> x = Random(tokens * d_inner, 22), dy = Random(tokens * d_inner, 23);
    const auto expected = ScanBackward(Widen(scan.parameters, x), Wide(dy));
    OnEveryTarget([&] {
      const Gradients actual = Backward(scan.parameters, x, dy);
      EXPECT_TRUE(Close(actual.dx, expected.dx));
      EXPECT_TRUE(Close(actual.ddelta, expected.ddelta));
      EXPECT_TRUE(Close(actual.dB, expected.dB));
      EXPECT_TRUE(Close(actual.dC, expected.dC));
    });
  }
}

// What dy . y gains when *value does, by central differences in double.
double Slope(reference::WideScan& scan, const std::vector<double>& dy, double* value) {
  const double at = *value, step = 1e-5;
  const auto product = [&] {
    const std::vector<double> y = ScanForward(scan);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += dy[i] * y[i];
    return sum;
  };
  *value = at + step;
  const double above = product();
  *value = at - step;
  const double below = product();
  *value = at;
  return (above - below) / (2 * step);
}

TEST(ScanBackward, EqualsFiniteDifferences) {
  const RandomScan random(19, 3, 2, /*seed=*/24);
  const std::vector<float> x = Random(19 * 3, 25), dy = Random(19 * 3, 26);
  const Gradients actual = Backward(random.parameters, x, dy);
  reference::WideScan scan = Widen(random.parameters, x);
  const auto slopes = [&](std::vector<double>& of) {
    std::vector<double> all;
    for (double& value : of) all.push_back(Slope(scan, Wide(dy), &value));
    return all;
  };
  EXPECT_TRUE(Close(actual.dx, slopes(scan.x)));
  EXPECT_TRUE(Close(actual.ddelta, slopes(scan.delta)));
  EXPECT_TRUE(Close(actual.dB, slopes(scan.B)));
  EXPECT_TRUE(Close(actual.dC, slopes(scan.C)));
}

TEST(ScanBackward, DxIsTheAdjoint) {
  const RandomScan scan(70, 40, 16, /*seed=*/27);
  const std::vector<float> x = Random(70 * 40, 28), dy = Random(70 * 40, 29);
  EXPECT_TRUE(Close(Backward(scan.parameters, x, dy).dx, Wide(Adjoint(scan.parameters, dy))));
}

TEST(ScanBackward, AddsToDxWhereAsked) {
  const RandomScan scan(40, 19, 6, /*seed=*/30);
  const std::vector<float> x = Random(40 * 19, 31), dy = Random(40 * 19, 32);
  std::vector<float> dx = Random(40 * 19, 33), ddelta(dx), dbc(40 * 12);
  const Gradients alone = Backward(scan.parameters, x, dy);
  std::vector<float> expected = dx;
  for (size_t i = 0; i < dx.size(); ++i) expected[i] = alone.dx[i] + expected[i];
  ThreadPool pool(1);
  ScanBackward(pool, scan.parameters, x.data(), dy.data(),
               {dx.data(), /*accumulate_dx=*/true, ddelta.data(), dbc.data(), dbc.data() + 6, 12});
  EXPECT_TRUE(SameBits(dx, expected));
  EXPECT_TRUE(SameBits(ddelta, alone.ddelta));
}

// The largest steps and decays that a model can have end in zeros, not in NaN.
TEST(ScanBackward, SurvivesVanishingDecays) {
  const RandomScan scan(100, 20, 16, /*seed=*/34, /*slowest=*/1e-6f, /*fastest=*/50.0f);
  const std::vector<float> x = Random(100 * 20, 35), dy = Random(100 * 20, 36);
  const auto expected = ScanBackward(Widen(scan.parameters, x), Wide(dy));
  const Gradients actual = Backward(scan.parameters, x, dy);
  EXPECT_TRUE(Close(actual.dx, expected.dx));
  EXPECT_TRUE(Close(actual.ddelta, expected.ddelta));
  EXPECT_TRUE(Close(actual.dB, expected.dB));
  EXPECT_TRUE(Close(actual.dC, expected.dC));
}

TEST(ScanBackward, OfNoTokensWritesNothing) {
  const RandomScan scan(0, 70, 16, /*seed=*/40);
  const Gradients none = Backward(scan.parameters, {}, {}, 2);
  EXPECT_TRUE(none.dx.empty() && none.dB.empty());
  EXPECT_TRUE(Adjoint(scan.parameters, {}, 2).empty());
}

TEST(ScanBackward, BitsDoNotDependOnThreads) {
  const RandomScan scan(70, 777, 16, /*seed=*/37);
  const std::vector<float> x = Random(70 * 777, 38), dy = Random(70 * 777, 39);
  const Gradients one = Backward(scan.parameters, x, dy, 1);
  for (const int threads : {2, 5}) {
    const Gradients more = Backward(scan.parameters, x, dy, threads);
    EXPECT_TRUE(SameBits(more.dx, one.dx));
    EXPECT_TRUE(SameBits(more.ddelta, one.ddelta));
    EXPECT_TRUE(SameBits(more.dB, one.dB));
    EXPECT_TRUE(SameBits(more.dC, one.dC));
  }
}

}  // namespace
}  // namespace mambascope::kernels
