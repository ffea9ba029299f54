#include "server/kernels/norm_backward.h"

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::Random;
using reference::SameBits;

double Scale(std::span<const double> h, double eps) {
  double squares = 0;
  for (const double v : h) squares += v * v;
  return 1 / std::sqrt(squares / static_cast<double>(h.size()) + eps);
}

// The formula for rows (or groups) as long as `weight`, in double.
std::vector<double> Expected(std::span<const float> h, std::span<const float> weight, double eps,
                             std::span<const float> du, bool frozen) {
  const size_t cols = weight.size();
  std::vector<double> dh(h.size());
  for (size_t at = 0; at < h.size(); at += cols) {
    const std::vector<double> row(h.begin() + at, h.begin() + at + cols);
    const double s = Scale(row, eps);
    double along = 0;
    for (size_t m = 0; m < cols; ++m) along += double{weight[m]} * du[at + m] * row[m];
    for (size_t m = 0; m < cols; ++m) {
      dh[at + m] = s * weight[m] * du[at + m];
      if (!frozen) dh[at + m] -= row[m] * s * s * s / static_cast<double>(cols) * along;
    }
  }
  return dh;
}

// Of zeros, so what is added.
std::vector<float> Gradient(std::span<const float> h, const std::vector<float>& weight,
                            std::span<const float> du, bool frozen = false, int threads = 1) {
  ThreadPool pool(threads);
  std::vector<float> dh(h.size());
  const int64_t cols = static_cast<int64_t>(weight.size());
  RmsNormBackward(pool, h.data(), weight.data(), 1e-5f, static_cast<int64_t>(h.size()) / cols, cols,
                  du.data(), frozen, dh.data());
  return dh;
}

TEST(RmsNormBackward, EqualsTheFormulaAroundRegisterBorders) {
  OnEveryTarget([] {
    for (const int64_t cols : {1, 3, 4, 8, 15, 16, 17, 63, 64, 65, 100, 127, 128, 768, 2561}) {
      SCOPED_TRACE(cols);
      const std::vector<float> h = Random(3 * cols, 1, -5, 5), weight = Random(cols, 2);
      const std::vector<float> du = Random(3 * cols, 3);
      for (const bool frozen : {false, true}) {
        EXPECT_TRUE(Close(Gradient(h, weight, du, frozen), Expected(h, weight, 1e-5, du, frozen)));
      }
    }
  });
}

TEST(RmsNormBackward, IsTheSlopeOfTheNorm) {
  const int64_t cols = 19;
  const std::vector<float> h = Random(cols, 1, -2, 2), weight = Random(cols, 2);
  const std::vector<float> du = Random(cols, 3), dh = Gradient(h, weight, du);
  for (int64_t moved = 0; moved < cols; ++moved) {
    const auto loss = [&](double step) {
      std::vector<double> row(h.begin(), h.end());
      row[moved] += step;
      const double s = Scale(row, 1e-5);
      double sum = 0;
      for (int64_t m = 0; m < cols; ++m) sum += double{du[m]} * weight[m] * row[m] * s;
      return sum;
    };
    EXPECT_NEAR(dh[moved], (loss(1e-4) - loss(-1e-4)) / 2e-4, 1e-5) << moved;
  }
}

TEST(RmsNormBackward, AddsAndTakesAMissingWeightForOnes) {
  ThreadPool pool(2);
  const int64_t rows = 4, cols = 50;
  const std::vector<float> h = Random(rows * cols, 1), du = Random(rows * cols, 3);
  const std::vector<float> before = Random(rows * cols, 4), ones(cols, 1.0f);
  std::vector<float> dh = before;
  RmsNormBackward(pool, h.data(), nullptr, 1e-5f, rows, cols, du.data(), false, dh.data());
  std::vector<double> expected = Expected(h, ones, 1e-5, du, false);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += before[i];
  EXPECT_TRUE(Close(dh, expected));
}

TEST(RmsNormBackward, ARowHasTheBitsItHasAloneOnAnyThreads) {
  OnEveryTarget([] {
    const int64_t rows = 250, cols = 77;
    const std::vector<float> h = Random(rows * cols, 3), weight = Random(cols, 4);
    const std::vector<float> du = Random(rows * cols, 5);
    for (const int threads : {1, 2, 5}) {
      const std::vector<float> all = Gradient(h, weight, du, false, threads);
      for (int64_t i = 0; i < rows; ++i) {
        const auto row = [&](const std::vector<float>& of) {
          return std::span(of).subspan(i * cols, cols);
        };
        ASSERT_TRUE(SameBits(row(all), Gradient(row(h), weight, row(du))));
      }
    }
  });
}

TEST(GroupRmsNormBackward, TakesEachGroupOnItsOwnAndMayWriteOverItsInput) {
  OnEveryTarget([] {
    for (const int64_t width : {1, 5, 16, 33, 768}) {
      for (const int64_t groups : {1, 2, 3}) {
        SCOPED_TRACE(testing::Message() << groups << " groups of " << width);
        const int64_t rows = 30, cols = width * groups;
        const std::vector<float> g = Random(rows * cols, 11, -5, 5), weight = Random(cols, 12);
        const std::vector<float> dout = Random(rows * cols, 13);
        for (const bool frozen : {false, true}) {
          std::vector<double> expected;
          for (int64_t at = 0; at < rows * cols; at += width) {
            const std::vector<double> part = Expected(
                std::span(g).subspan(at, width), std::span(weight).subspan(at % cols, width), 1e-5,
                std::span(dout).subspan(at, width), frozen);
            expected.insert(expected.end(), part.begin(), part.end());
          }
          std::vector<float> dg(g.size(), std::nanf(""));
          ThreadPool one(1);
          GroupRmsNormBackward(one, g.data(), weight.data(), 1e-5f, rows, cols, groups, dout.data(),
                               frozen, dg.data());
          EXPECT_TRUE(Close(dg, expected));
          for (const int threads : {2, 5}) {
            ThreadPool pool(threads);
            std::vector<float> over = dout;
            GroupRmsNormBackward(pool, g.data(), weight.data(), 1e-5f, rows, cols, groups,
                                 over.data(), frozen, over.data());
            EXPECT_TRUE(SameBits(over, dg));
          }
        }
      }
    }
  });
}

TEST(RmsScaleBackwardInPlace, TakesItsColumnsAndLeavesTheOthers) {
  OnEveryTarget([] {
    for (const int64_t cols : {1, 3, 16, 17, 48, 130}) {
      SCOPED_TRACE(cols);
      const int64_t rows = 300, v_stride = cols + 5, dv_stride = cols + 2;
      const std::vector<float> v = Random(rows * v_stride, 13, -5, 5), ones(cols, 1.0f);
      const std::vector<float> before = Random(rows * dv_stride, 14);
      const auto run = [&](int threads) {
        ThreadPool pool(threads);
        std::vector<float> dv = before;
        RmsScaleBackwardInPlace(pool, v.data(), v_stride, rows, cols, 1e-6f, dv.data(), dv_stride);
        return dv;
      };
      const std::vector<float> dv = run(1);
      EXPECT_TRUE(SameBits(run(2), dv));
      EXPECT_TRUE(SameBits(run(5), dv));
      for (int64_t i = 0; i < rows; ++i) {
        const std::span<const float> row = std::span(dv).subspan(i * dv_stride, dv_stride);
        const std::span<const float> was = std::span(before).subspan(i * dv_stride, dv_stride);
        ASSERT_TRUE(Close(row.first(cols), Expected(std::span(v).subspan(i * v_stride, cols), ones,
                                                    1e-6, was.first(cols), false)));
        ASSERT_TRUE(SameBits(row.subspan(cols), was.subspan(cols)));
      }
    }
  });
}

}  // namespace
}  // namespace mambascope::kernels
