#include "server/kernels/rms_norm.h"

#include <algorithm>
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

std::vector<float> Norm(const std::vector<float>& h, const std::vector<float>& weight,
                        float eps = 1e-5f, int threads = 1) {
  ThreadPool pool(threads);
  std::vector<float> u(h.size());
  const int64_t cols = static_cast<int64_t>(weight.size());
  RmsNorm(pool, h.data(), weight.data(), eps, static_cast<int64_t>(h.size()) / cols, cols,
          u.data());
  return u;
}

TEST(RmsNorm, EqualsTheDefinitionAroundRegisterBorders) {
  OnEveryTarget([] {
    for (const int64_t cols : {1, 3, 4, 8, 15, 16, 17, 63, 64, 65, 100, 127, 128, 768, 2561}) {
      SCOPED_TRACE(cols);
      const std::vector<float> h = Random(3 * cols, 1, -5, 5), weight = Random(cols, 2);
      EXPECT_TRUE(Close(Norm(h, weight), reference::RmsNorm(h, weight, 1e-5)));
    }
  });
}

TEST(RmsNorm, ARowOfZerosStaysZero) {
  const std::vector<float> zeros(40, 0.0f);
  EXPECT_EQ(Norm(zeros, Random(40, 1)), zeros);
}

TEST(RmsNorm, EpsilonIsInsideTheRoot) {
  const std::vector<float> u = Norm({1e-3f, 1e-3f}, {1, 1}, /*eps=*/3e-6f);
  EXPECT_NEAR(u[0], 1e-3 / 2e-3, 1e-6);  // sqrt(1e-6 + 3e-6) = 2e-3
}

TEST(RmsNorm, ARowHasTheBitsItHasAlone) {
  OnEveryTarget([] {
    const int64_t cols = 77, rows = 23;
    const std::vector<float> h = Random(rows * cols, 3), weight = Random(cols, 4);
    for (const int threads : {1, 2, 5}) {
      const std::vector<float> all = Norm(h, weight, 1e-5f, threads);
      for (int64_t i = 0; i < rows; ++i) {
        const std::vector<float> row(h.begin() + i * cols, h.begin() + (i + 1) * cols);
        EXPECT_TRUE(SameBits(std::span(all).subspan(i * cols, cols), Norm(row, weight)));
      }
    }
  });
}

TEST(RmsNorm, TheThreadCountChangesNoBitOfALargeBatch) {
  const std::vector<float> h = Random(100 * 768, 5), weight = Random(768, 6);
  EXPECT_TRUE(SameBits(Norm(h, weight, 1e-5f, 2), Norm(h, weight, 1e-5f, 1)));
}

TEST(RmsNorm, MayWriteOverItsInput) {
  const std::vector<float> h = Random(5 * 70, 7), weight = Random(70, 8);
  std::vector<float> u = h;
  ThreadPool pool(1);
  RmsNorm(pool, u.data(), weight.data(), 1e-5f, 5, 70, u.data());
  EXPECT_TRUE(SameBits(u, Norm(h, weight)));
}

TEST(GroupRmsNorm, NormalisesEachGroupOnItsOwn) {
  OnEveryTarget([] {
    for (const int64_t width : {1, 5, 16, 33, 768}) {
      for (const int64_t groups : {1, 2, 3}) {
        SCOPED_TRACE(testing::Message() << groups << " groups of " << width);
        const int64_t rows = 30, cols = width * groups;
        const std::vector<float> g = Random(rows * cols, 11, -5, 5), weight = Random(cols, 12);
        std::vector<double> expected(g.size());
        for (int64_t at = 0; at < rows * cols; at += width) {
          const std::span<const float> part(g.data() + at, width);
          const std::span<const float> part_weight(weight.data() + at % cols, width);
          const std::vector<double> normed = reference::RmsNorm(part, part_weight, 1e-5);
          std::copy(normed.begin(), normed.end(), expected.begin() + at);
        }
        std::vector<float> out(g.size()), in_place = g;
        ThreadPool one(1), three(3);
        GroupRmsNorm(one, g.data(), weight.data(), 1e-5f, rows, cols, groups, out.data());
        EXPECT_TRUE(Close(out, expected));
        GroupRmsNorm(three, in_place.data(), weight.data(), 1e-5f, rows, cols, groups,
                     in_place.data());
        EXPECT_TRUE(SameBits(in_place, out));
      }
    }
  });
}

TEST(RmsScaleInPlace, ScalesItsColumnsAndLeavesTheOthers) {
  OnEveryTarget([] {
    for (const int64_t cols : {1, 3, 16, 17, 48, 130}) {
      SCOPED_TRACE(cols);
      const int64_t rows = 300, stride = cols + 5;
      const std::vector<float> before = Random(rows * stride, 13, -5, 5);
      std::vector<float> v = before, again = before;
      ThreadPool one(1), three(3);
      RmsScaleInPlace(one, v.data(), rows, cols, stride, 1e-6f);
      RmsScaleInPlace(three, again.data(), rows, cols, stride, 1e-6f);
      EXPECT_TRUE(SameBits(again, v));
      const std::vector<float> ones(cols, 1.0f);
      for (int64_t i = 0; i < rows; ++i) {
        const std::span<const float> row(before.data() + i * stride, stride);
        const std::span<const float> scaled(v.data() + i * stride, stride);
        ASSERT_TRUE(Close(scaled.first(cols), reference::RmsNorm(row.first(cols), ones, 1e-6)));
        ASSERT_TRUE(SameBits(scaled.subspan(cols), row.subspan(cols)));
      }
    }
  });
}

TEST(AddInPlace, AddsEveryElementOnce) {
  OnEveryTarget([] {
    for (const int64_t count : {0, 1, 15, 16, 17, 1023, 1025, 40000}) {
      std::vector<float> h = Random(count, 9);
      const std::vector<float> out = Random(count, 10);
      std::vector<float> expected = h;
      for (int64_t i = 0; i < count; ++i) expected[i] += out[i];
      ThreadPool pool(3);
      AddInPlace(pool, out.data(), count, h.data());
      EXPECT_TRUE(SameBits(h, expected)) << count;
    }
  });
}

}  // namespace
}  // namespace mambascope::kernels
