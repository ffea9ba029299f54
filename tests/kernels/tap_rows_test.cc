// What a mixer's output reads of each input token, against its definition in double.
#include "server/kernels/tap_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace mambascope::kernels {
namespace {

double Apply(Activation f, double v) {
  if (f == Activation::kSilu) return v / (1 + std::exp(-v));
  return f == Activation::kRelu ? std::max(v, 0.0) : v;
}

class TapRowsTest : public ::testing::TestWithParam<int> {
 protected:
  std::vector<float> Random(int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = std::uniform_real_distribution<float>(-2, 2)(random_);
    return values;
  }
  std::mt19937 random_{static_cast<uint32_t>(GetParam())};
};

TEST_P(TapRowsTest, AreTheirDefinitionWhateverRangeIsAskedFor) {
  const int64_t target = GetParam() * 7 % 70, taps = 1 + GetParam() % 5;
  const int64_t channels = 1 + GetParam() * 11 % 67, stride = channels + GetParam() % 3;
  const std::vector<float> row = Random((target + 1) * channels);
  const std::vector<float> x_in = Random((target + 1) * stride), weight = Random(taps * channels);
  for (const Activation f : {Activation::kIdentity, Activation::kSilu, Activation::kRelu}) {
    TapRow in;
    in.row = row.data();
    in.target = target;
    in.x_in = x_in.data();
    in.x_stride = stride;
    in.weight = weight.data();
    in.channels = channels;
    in.taps = taps;
    in.f = f;
    std::vector<float> all((target + 1) * channels);
    TapRows(in, 0, target + 1, /*accumulate=*/false, all.data(), channels);
    for (int64_t j = 0; j <= target; ++j) {
      for (int64_t d = 0; d < channels; ++d) {
        double sum = 0;
        for (int64_t m = 0; m < taps && j + m <= target; ++m) {
          sum += row[(j + m) * channels + d] *
                 Apply(f, double{weight[m * channels + d]} * x_in[j * stride + d]);
        }
        ASSERT_NEAR(all[j * channels + d], sum, 2e-5);
      }
    }
    // A part of it, from the last to the first, added to what is there.
    const int64_t begin = target / 3, end = target + 1 - target / 4;
    std::vector<float> part((end - begin) * channels, 1.0f);
    TapRows(in, begin, end, /*accumulate=*/true, part.data() + (end - begin - 1) * channels,
            -channels);
    for (int64_t j = begin; j < end; ++j) {
      for (int64_t d = 0; d < channels; ++d) {
        ASSERT_EQ(part[(end - 1 - j) * channels + d], all[j * channels + d] + 1.0f);
      }
    }
  }
}

TEST_P(TapRowsTest, FoldedRowsAreTheirDefinition) {
  const int64_t target = GetParam() * 13 % 140, per_map = GetParam() % 3 == 0 ? 1 : GetParam() * 5;
  const int64_t maps = 1 + GetParam() * 17 % 90, channels = maps * per_map;
  const int64_t stride = channels + 3;
  const std::vector<float> alpha = Random((target + 1) * maps), skip = Random(maps);
  const std::vector<float> scale = Random(channels), slope = Random((target + 1) * stride);
  for (const bool sloped : {true, false}) {
    std::vector<float> row((target + 1) * channels), sums(channels);
    RowFold fold;
    fold.alpha = alpha.data();
    fold.maps = maps;
    fold.channels_per_map = per_map;
    fold.target = target;
    fold.skip = skip.data();
    fold.scale = scale.data();
    fold.slope = sloped ? slope.data() : nullptr;
    fold.slope_stride = stride;
    fold.row = row.data();
    fold.row_stride = channels;
    fold.sums = sums.data();
    FoldRow(fold, 0, maps / 2);
    FoldRow(fold, maps / 2, maps);
    for (int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (int64_t k = 0; k <= target; ++k) {
        const double value =
            (double{alpha[k * maps + c / per_map]} + (k == target ? skip[c / per_map] : 0)) *
            scale[c] * (sloped ? slope[k * stride + c] : 1);
        ASSERT_NEAR(row[k * channels + c], value, 1e-5);
        sum += value;
      }
      ASSERT_NEAR(sums[c], sum, 2e-4);
    }
  }
}

TEST(ActivationSlope, IsTheActivationOverItsArgument) {
  std::vector<float> c;
  for (int i = -200; i <= 200; ++i) c.push_back(static_cast<float>(i) / 9);
  for (const Activation f : {Activation::kIdentity, Activation::kSilu, Activation::kRelu}) {
    std::vector<float> slope = c;
    ActivationSlope(f, slope);
    for (size_t i = 0; i < c.size(); ++i) {
      if (c[i] != 0) {
        EXPECT_NEAR(slope[i], Apply(f, c[i]) / c[i], 1e-6);
      }
      EXPECT_TRUE(std::isfinite(slope[i]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, TapRowsTest, ::testing::Range(0, 50));

}  // namespace
}  // namespace mambascope::kernels
