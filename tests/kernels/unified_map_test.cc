#include "server/kernels/unified_map.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "server/base/array.h"
#include "tests/support/reference_attention.h"

namespace mambascope::kernels {
namespace {

// Around the strips of 32 rows, the last or the first of them short.
constexpr int64_t kLengths[] = {1, 2, 31, 32, 33, 64, 70, 129};

TEST(UnifiedMap, RowsAreTheDefinitionAndOfAlphaTheChannelsMap) {
  for (const int64_t tokens : kLengths) {
    for (const int64_t d_state : {1, 6, 16, 17}) {
      for (const bool short_first : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << tokens << " tokens, " << d_state << " states, " << short_first);
        const reference::RandomScan random(tokens, 3, d_state, 7);
        const reference::ReferenceAttention definition(random.parameters);
        const std::vector<double> expected = definition.ChannelMap(1);
        std::mt19937 engine(5);
        std::normal_distribution<float> normal;
        std::vector<float> gate(tokens), slope(tokens), weight(4);
        for (auto* values : {&gate, &slope, &weight}) {
          for (float& value : *values) value = normal(engine);
        }
        const UnifiedChannel channel{gate.data(), slope.data(), weight.data(), 4, 0.7f, 0.3f};

        const MapStrips strips{tokens, short_first};
        const int64_t stride = (tokens + 31) / 32 * 32 + 32;
        Array<float> factors(MapFactorsSize(tokens, d_state)), alpha(kMapStrip * stride);
        FactorMap(random.parameters, 1, strips, factors.data());
        int64_t rows = 0;
        for (int64_t strip = 0; strip < strips.count(); ++strip) {
          MapStripRows(random.parameters, 1, strips, factors.data(), strip, stride, alpha.data());
          for (int64_t i = strips.begin(strip); i < strips.end(strip); ++i, ++rows) {
            const float* row = alpha.data() + (i - strips.begin(strip)) * stride;
            std::vector<float> scratch(tokens + 4 + kMapStrip), out(i + 1);
            const double constant = UnifiedRow(channel, row, i, scratch.data(), out.data());
            double bias = 0;
            for (int64_t j = 0; j <= i; ++j) {
              ASSERT_NEAR(row[j], expected[i * tokens + j], 1e-5);
              double sum = 0;
              for (int64_t m = j; m <= std::min(i, j + 3); ++m) {
                const double inner = expected[i * tokens + m] + (m == i ? 0.7 : 0);
                sum += gate[i] * inner * slope[m] * weight[3 - (m - j)];
              }
              ASSERT_NEAR(out[j], sum, 1e-4);
              bias += 0.3 * gate[i] * (expected[i * tokens + j] + (j == i ? 0.7 : 0)) * slope[j];
            }
            ASSERT_NEAR(constant, bias, 1e-4);
          }
        }
        EXPECT_EQ(rows, tokens);
      }
    }
  }
}

TEST(UnifiedMap, StripsOfBothOrdersAreEachOthersMirror) {
  for (const int64_t tokens : kLengths) {
    const MapStrips last{tokens, false}, first{tokens, true};
    for (int64_t strip = 0; strip < last.count(); ++strip) {
      const int64_t mirror = last.count() - 1 - strip;
      EXPECT_EQ(last.begin(strip), tokens - first.end(mirror));
      EXPECT_EQ(last.end(strip), tokens - first.begin(mirror));
    }
  }
}

TEST(UnifiedMap, FastDecaysOverflowNothing) {
  const reference::RandomScan random(200, 2, 4, 3, 5.0f, 50.0f);
  const MapStrips strips{200, false};
  Array<float> factors(MapFactorsSize(200, 4)), alpha(kMapStrip * 256);
  FactorMap(random.parameters, 0, strips, factors.data());
  for (int64_t strip = 0; strip < strips.count(); ++strip) {
    MapStripRows(random.parameters, 0, strips, factors.data(), strip, 256, alpha.data());
    for (int64_t i = strips.begin(strip); i < strips.end(strip); ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        ASSERT_TRUE(std::isfinite(alpha[(i - strips.begin(strip)) * 256 + j]));
      }
    }
  }
}

TEST(UnifiedMap, RowsAddUpAndTheirMagnitudesToo) {
  for (const int64_t count : {1, 7, 16, 37}) {
    std::vector<float> row(count), sum(count, 1.0f), magnitudes(count, 1.0f);
    for (int64_t j = 0; j < count; ++j) row[j] = static_cast<float>(j % 2 == 0 ? -j : j);
    AddRowTo(row.data(), count, false, sum.data());
    AddRowTo(row.data(), count, true, magnitudes.data());
    for (int64_t j = 0; j < count; ++j) {
      EXPECT_EQ(sum[j], 1 + row[j]);
      EXPECT_EQ(magnitudes[j], 1 + static_cast<float>(j));
    }
  }
}

}  // namespace
}  // namespace mambascope::kernels
