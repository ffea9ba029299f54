#include "server/explain/tensor_writer.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "server/explain/half.h"
#include "tests/explain/explained.h"
#include "tests/support/decoded_tensor.h"

namespace mambascope::explain {
namespace {

using ::mambascope::testing::CollectingSink;
using ::mambascope::testing::DeliveredTensor;
using ::mambascope::testing::HalfToFloat;
using ::mambascope::testing::Join;
using ::mambascope::testing::Sha256;

TEST(Half, EveryHalfIsItself) {
  for (uint32_t half = 0; half < 65536; ++half) {
    const float value = HalfToFloat(static_cast<uint16_t>(half));
    if (std::isnan(value)) {
      const uint16_t back = FloatToHalf(value);
      EXPECT_EQ(back & 0x7c00, 0x7c00);
      EXPECT_NE(back & 0x3ff, 0);
    } else {
      EXPECT_EQ(FloatToHalf(value), half);
    }
  }
}

// Between two neighbouring halves: the nearer one, and from the middle the even one.
TEST(Half, RoundsToNearestEven) {
  for (uint32_t half = 0; half < 0x7bff; ++half) {
    const float low = HalfToFloat(static_cast<uint16_t>(half));
    const float high = HalfToFloat(static_cast<uint16_t>(half + 1));
    const float middle = low + (high - low) / 2;  // exact: one more bit than a half has
    const uint32_t even = half % 2 == 0 ? half : half + 1;
    EXPECT_EQ(FloatToHalf(middle), even);
    EXPECT_EQ(FloatToHalf(-middle), even | 0x8000);
    EXPECT_EQ(FloatToHalf(std::nextafter(middle, 0.0f)), half);
    EXPECT_EQ(FloatToHalf(std::nextafter(middle, 1e9f)), half + 1);
  }
}

TEST(Half, BeyondTheRangeIsInfinityAndTinyIsZero) {
  EXPECT_EQ(FloatToHalf(65519.996f), 0x7bff);
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToHalf(-1e30f), 0xfc00);
  EXPECT_EQ(FloatToHalf(std::numeric_limits<float>::infinity()), 0x7c00);
  EXPECT_EQ(FloatToHalf(std::ldexp(1.0f, -25)), 0);
  EXPECT_EQ(FloatToHalf(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(FloatToHalf(-0.0f), 0x8000);
}

TEST(TensorInfo, NamesEntriesOnlyWhereTheyAreNotTheirIndices) {
  const v1::TensorInfo info = MakeTensorInfo(
      "maps", {{"layers", 2, {3, 5}}, {"channels", 3, {0, 1, 2}}, {"input_tokens", 7, {}}},
      v1::DATA_TYPE_FP16);
  EXPECT_EQ(info.total_bytes(), 2 * 3 * 7 * 2);
  EXPECT_EQ(info.axes(0).labels_size(), 2);
  EXPECT_EQ(info.axes(0).labels(1), 5);
  EXPECT_EQ(info.axes(1).labels_size(), 0);
  EXPECT_EQ(info.axes(2).size(), 7);
}

std::vector<float> Ramp(int count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), -3.5f);
  return values;
}

TEST(TensorWriter, ChunksJoinToTheValuesHoweverTheyAreGivenAndCut) {
  const std::vector<float> values = Ramp(1000);
  std::string digest;
  for (const int64_t chunk : {4, 6, 100, 1021, 1 << 20}) {
    for (const size_t piece : {1, 7, 333, 1000}) {
      CollectingSink sink;
      TensorWriter writer("e", {MakeTensorInfo("t", {{"n", 1000, {}}}, v1::DATA_TYPE_FP32)}, chunk,
                          &sink);
      for (size_t begin = 0; begin < values.size(); begin += piece) {
        writer.Write("t", std::span(values).subspan(begin, std::min(piece, 1000 - begin)));
      }
      const auto joined =
          Join({MakeTensorInfo("t", {{"n", 1000, {}}}, v1::DATA_TYPE_FP32)}, sink.events, chunk);
      EXPECT_EQ(joined[0].values, values);
      EXPECT_EQ(sink.events[0].tensor_chunk().explanation_id(), "e");
      EXPECT_EQ(writer.bytes_written(), 4000);
      const auto digests = writer.Finish();
      EXPECT_EQ(digests[0].sha256(), Sha256(joined[0].bytes));
      if (digest.empty()) digest = digests[0].sha256();
      EXPECT_EQ(digests[0].sha256(), digest);
    }
  }
}

TEST(TensorWriter, HalvesAndIntegersInterleave) {
  const std::vector<v1::TensorInfo> infos = {
      MakeTensorInfo("halves", {{"n", 10, {}}}, v1::DATA_TYPE_FP16),
      MakeTensorInfo("indices", {{"n", 4, {}}}, v1::DATA_TYPE_INT32)};
  CollectingSink sink;
  TensorWriter writer("e", infos, 7, &sink);  // three halves or one integer a chunk
  const std::vector<float> values = Ramp(10);
  const std::vector<int32_t> indices = {4, -1, 1 << 30, 0};
  writer.Write("halves", std::span(values).first(5));
  writer.Write("indices", std::span<const int32_t>(indices));
  writer.Write("halves", std::span(values).last(5));
  const auto joined = Join(infos, sink.events, 7);
  EXPECT_EQ(joined[1].indices, indices);
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half;
    std::memcpy(&half, joined[0].bytes.data() + 2 * i, 2);
    EXPECT_EQ(HalfToFloat(half), values[i]);
  }
  for (const DeliveredTensor& tensor : joined) {
    const auto digests = writer.Finish();
    EXPECT_EQ(digests.size(), 2u);
    EXPECT_EQ(digests[&tensor - joined.data()].sha256(), Sha256(tensor.bytes));
    break;  // digests can be taken once
  }
}

TEST(TensorWriter, AnEmptyTensorSendsNothingAndHasTheDigestOfNothing) {
  CollectingSink sink;
  TensorWriter writer("e", {MakeTensorInfo("t", {{"n", 0, {}}}, v1::DATA_TYPE_FP32)}, 1024, &sink);
  writer.Write("t", std::span<const float>());
  EXPECT_TRUE(sink.events.empty());
  EXPECT_EQ(writer.Finish()[0].sha256(),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(TensorWriterDeathTest, RefusesUnknownTensorsAndTooManyOrTooFewValues) {
  CollectingSink sink;
  TensorWriter writer("e", {MakeTensorInfo("t", {{"n", 2, {}}}, v1::DATA_TYPE_FP32)}, 1024, &sink);
  const std::vector<float> values = Ramp(3);
  EXPECT_DEATH(writer.Write("other", std::span<const float>(values)), "broken invariant");
  EXPECT_DEATH(writer.Write("t", std::span<const float>(values)), "broken invariant");
  EXPECT_DEATH(writer.Finish(), "broken invariant");
}

}  // namespace
}  // namespace mambascope::explain
