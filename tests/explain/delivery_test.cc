// What reaches a client of tensors that are quantised or sparse.
#include "server/explain/delivery.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "server/explain/half.h"
#include "server/explain/quantize.h"
#include "tests/explain/explained.h"
#include "tests/support/decoded_tensor.h"

namespace mambascope::explain {
namespace {

using ::mambascope::testing::CollectingSink;
using ::mambascope::testing::DecodedTensor;
using ::mambascope::testing::DecodeTensor;
using ::mambascope::testing::Sha256;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Delivered {
  v1::TensorInfo info;
  std::string bytes;
  DecodedTensor decoded;
  float mass_kept = 0;
  std::vector<float> recorded;
};

Plan PlanOf(std::vector<Axis> axes, const v1::Delivery& delivery) {
  Plan plan;
  plan.tensors.push_back(MakeTensorInfo("t", std::move(axes), FloatTypeOf(delivery)));
  ApplyDelivery(delivery, &plan);
  return plan;
}

// Writes `values` piece by piece and checks what every delivery promises.
Delivered Deliver(const std::vector<float>& values, const std::vector<Axis>& axes,
                  const v1::Delivery& delivery, size_t piece, int64_t chunk) {
  Delivered out;
  const Plan plan = PlanOf(axes, delivery);
  out.info = plan.tensors[0];
  CollectingSink sink;
  TensorWriter writer("e", plan.tensors, chunk, &sink, delivery);
  writer.Record("t", &out.recorded);
  for (size_t begin = 0; begin < values.size(); begin += piece) {
    writer.Write("t", std::span(values).subspan(begin, std::min(piece, values.size() - begin)));
  }
  for (const v1::PredictEvent& event : sink.events) {
    EXPECT_EQ(event.tensor_chunk().byte_offset(), static_cast<int64_t>(out.bytes.size()));
    EXPECT_GT(event.tensor_chunk().data().size(), 0u);
    EXPECT_LE(event.tensor_chunk().data().size(), static_cast<size_t>(chunk));
    out.bytes += event.tensor_chunk().data();
  }
  EXPECT_EQ(writer.Finish()[0].sha256(), Sha256(out.bytes));
  EXPECT_EQ(writer.bytes_written(), static_cast<int64_t>(out.bytes.size()));
  EXPECT_LE(static_cast<int64_t>(out.bytes.size()), out.info.total_bytes());
  out.mass_kept = writer.mass_kept().at(0);
  out.decoded = DecodeTensor(out.info, out.bytes);
  EXPECT_EQ(out.decoded.values.size(), values.size());
  EXPECT_EQ(out.recorded, values);
  return out;
}

v1::Delivery Uint8() {
  v1::Delivery delivery;
  delivery.set_dtype(v1::DATA_TYPE_UINT8);
  return delivery;
}
v1::Delivery TopK(int32_t k, v1::DataType dtype = v1::DATA_TYPE_FP32) {
  v1::Delivery delivery;
  delivery.set_dtype(dtype);
  delivery.set_sparse_top_k(k);
  return delivery;
}
v1::Delivery Threshold(float threshold) {
  v1::Delivery delivery;
  delivery.set_sparse_threshold(threshold);
  return delivery;
}
v1::Delivery Mass(float share) {
  v1::Delivery delivery;
  delivery.set_sparse_mass(share);
  return delivery;
}

std::vector<float> Normal(size_t count, uint64_t seed, float scale = 1, float shift = 0) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = scale * normal(random) + shift;
  return values;
}

const std::vector<Axis> kMaps = {
    {"layers", 3, {}}, {"output_tokens", 5, {}}, {"input_tokens", 7, {}}};

// ---- UINT8 ----

void ExpectWithinHalfASlabsStep(const std::vector<float>& values, const DecodedTensor& decoded) {
  const size_t slab = values.size() / decoded.scales.size();
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_LE(std::abs(decoded.values[i] - values[i]), double{decoded.scales[i / slab]} / 2)
        << values[i];
  }
}

TEST(Uint8, IsOffByAtMostHalfAStepHoweverItIsGivenAndCut) {
  const std::vector<float> values = Normal(105, 1);
  std::string bytes;
  for (const size_t piece : {1, 2, 7, 34, 35, 36, 105}) {
    for (const int64_t chunk : {4, 7, 43, 1024}) {
      const Delivered out = Deliver(values, kMaps, Uint8(), piece, chunk);
      EXPECT_EQ(out.info.total_bytes(), 3 * (8 + 35));
      EXPECT_EQ(static_cast<int64_t>(out.bytes.size()), out.info.total_bytes());
      EXPECT_EQ(out.mass_kept, 1);
      if (bytes.empty()) bytes = out.bytes;
      EXPECT_EQ(out.bytes, bytes);
      ExpectWithinHalfASlabsStep(values, out.decoded);
    }
  }
}

TEST(Uint8, HoldsForEveryMagnitudeAndOffset) {
  for (int exponent = -149; exponent <= 125; exponent += 3) {
    const float scale = std::ldexp(1.0f, exponent);
    for (const float shift : {0.0f, 1.0f, -300.0f, 1e6f, -1e8f}) {
      std::vector<float> values = Normal(105, exponent + 200);
      for (float& value : values) value = (value + shift) * scale;
      if (!std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }))
        continue;
      ExpectWithinHalfASlabsStep(values, Deliver(values, kMaps, Uint8(), 105, 1024).decoded);
    }
  }
}

TEST(Uint8, TakesTheWholeRangeOfFloats) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const std::vector<float> values = {-kMost, kMost, 0, 1};
  const Delivered out = Deliver(values, {{"n", 4, {}}}, Uint8(), 4, 1024);
  ExpectWithinHalfASlabsStep(values, out.decoded);
}

TEST(Uint8, AConstantSlabIsExact) {
  for (const float value : {0.0f, 1.0f, -0.1f, 3.3e38f, -1e-45f, 1.17e-38f}) {
    const std::vector<float> values(6, value);
    const Delivered out =
        Deliver(values, {{"n", 2, {}}, {"input_tokens", 3, {}}}, Uint8(), 4, 1024);
    for (const double decoded : out.decoded.values) EXPECT_EQ(decoded, double{value});
  }
}

// A causal map's upper triangle stays 0, and what is not negative stays so.
TEST(Uint8, ZeroIsExactAndSignsStay) {
  std::vector<float> values = Normal(105, 2);
  for (size_t i = 0; i < values.size(); i += 3) values[i] = 0;
  const Delivered out = Deliver(values, kMaps, Uint8(), 105, 1024);
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] == 0) {
      EXPECT_EQ(out.decoded.values[i], 0);
    }
  }
  for (float& value : values) value = std::abs(value) + 0.25f;
  for (const double value : Deliver(values, kMaps, Uint8(), 105, 1024).decoded.values)
    EXPECT_GE(value, 0);
}

TEST(Uint8, UsesAllOfItsSteps) {
  std::vector<float> values(256);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) / 255 - 0.5f;
  const Grid grid = GridOf(values);
  EXPECT_NEAR(grid.scale, 1.0 / 255, 1e-9);
  EXPECT_LE(Quantize(values.front(), grid), 1);
  EXPECT_GE(Quantize(values.back(), grid), 254);
}

TEST(Uint8, OneAxisIsOneSlabAndNoElementsAreNoBytes) {
  EXPECT_EQ(MakeTensorInfo("t", {{"n", 9, {}}}, v1::DATA_TYPE_UINT8).total_bytes(), 17);
  EXPECT_EQ(MakeTensorInfo("t", {{"n", 4, {}}, {"n", 0, {}}}, v1::DATA_TYPE_UINT8).total_bytes(),
            0);
  EXPECT_EQ(Deliver({}, {{"n", 0, {}}}, Uint8(), 1, 1024).bytes, "");
  EXPECT_EQ(Deliver({2.5f}, {{"n", 1, {}}}, Uint8(), 1, 1024).decoded.values[0], 2.5);
}

// ---- sparse rows ----

// The rule, by sorting all of a row.
std::vector<double> Kept(std::vector<float> row, const v1::Delivery& delivery) {
  std::vector<size_t> order(row.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return std::abs(row[a]) > std::abs(row[b]); });
  double mass = 0, sum = 0;
  for (const float value : row) mass += std::abs(double{value});
  std::vector<double> kept(row.size());
  for (size_t rank = 0; rank < row.size(); ++rank) {
    const float value = row[order[rank]];
    bool keep = false;
    if (delivery.has_sparse_top_k()) keep = rank < static_cast<size_t>(delivery.sparse_top_k());
    if (delivery.has_sparse_threshold()) keep = std::abs(value) >= delivery.sparse_threshold();
    if (delivery.has_sparse_mass()) keep = sum < mass * double{delivery.sparse_mass()};
    if (keep) kept[order[rank]] = value;
    sum += std::abs(double{value});
  }
  return kept;
}

TEST(Sparse, RowsHoldExactlyWhatTheRuleKeeps) {
  std::vector<float> values = Normal(4 * 333, 3);
  for (size_t i = 0; i < values.size(); ++i) {
    if (i % 333 > 100 + i / 10) values[i] = 0;         // as in a causal map
    if (i % 5 == 0) values[i] = i % 2 ? 0.5f : -0.5f;  // ties
  }
  std::fill(values.begin() + 333, values.begin() + 666, 0.0f);
  const std::vector<Axis> axes = {{"output_tokens", 4, {}}, {"input_tokens", 333, {}}};
  for (const v1::Delivery& delivery :
       {TopK(1), TopK(17), TopK(332), TopK(5000), Threshold(1e-30f), Threshold(0.5f),
        Threshold(1e30f), Mass(1e-9f), Mass(0.3f), Mass(0.95f), Mass(1)}) {
    SCOPED_TRACE(delivery.ShortDebugString());
    std::string bytes;
    for (const size_t piece : {1, 100, 333, 500, 1332}) {
      for (const int64_t chunk : {5, 1024, 1 << 20}) {
        const Delivered out = Deliver(values, axes, delivery, piece, chunk);
        if (bytes.empty()) bytes = out.bytes;
        EXPECT_EQ(out.bytes, bytes);
        double mass = 0, kept = 0;
        for (size_t r = 0; r < 4; ++r) {
          const std::vector<float> row(values.begin() + 333 * r, values.begin() + 333 * (r + 1));
          const std::vector<double> expected = Kept(row, delivery);
          const std::vector<double> got(out.decoded.values.begin() + 333 * r,
                                        out.decoded.values.begin() + 333 * (r + 1));
          EXPECT_EQ(got, expected);
          EXPECT_TRUE(std::is_sorted(out.decoded.columns[r].begin(), out.decoded.columns[r].end()));
          for (const float value : row) mass += std::abs(double{value});
          for (const double value : expected) kept += std::abs(value);
        }
        EXPECT_NEAR(out.mass_kept, kept / mass, 1e-6);
      }
    }
  }
}

TEST(Sparse, TheMassOfARowKeptWholeIsOne) {
  const std::vector<float> values = Normal(64, 4);
  const std::vector<Axis> axes = {{"output_tokens", 2, {}}, {"input_tokens", 32, {}}};
  EXPECT_EQ(Deliver(values, axes, Mass(1), 7, 1024).mass_kept, 1);
  EXPECT_EQ(Deliver(values, axes, TopK(32), 7, 1024).mass_kept, 1);
  EXPECT_EQ(Deliver(std::vector<float>(64, 0.0f), axes, TopK(3), 7, 1024).mass_kept, 1);
}

TEST(Sparse, HalvesAreRoundedAsDenseOnesAre) {
  const std::vector<float> values = {0.1f, -3, 0, 1e-30f};
  const Delivered out =
      Deliver(values, {{"input_tokens", 4, {}}}, TopK(3, v1::DATA_TYPE_FP16), 3, 9);
  EXPECT_THAT(out.decoded.columns[0], ElementsAre(0, 1, 3));
  EXPECT_THAT(out.decoded.values,
              ElementsAre(double{::mambascope::testing::HalfToFloat(FloatToHalf(0.1f))}, -3, 0, 0));
  EXPECT_EQ(out.bytes.size(), 4u + 3 * 6);
  EXPECT_EQ(out.info.total_bytes(), 4 + 3 * 6);
}

TEST(Sparse, TheInfoSaysTheMostThatMayCome) {
  const std::vector<Axis> axes = {{"output_tokens", 2, {}}, {"input_tokens", 8, {}}};
  EXPECT_EQ(PlanOf(axes, TopK(3)).tensors[0].total_bytes(), 2 * (4 + 3 * 8));
  EXPECT_EQ(PlanOf(axes, TopK(9)).tensors[0].total_bytes(), 2 * (4 + 8 * 8));
  EXPECT_EQ(PlanOf(axes, Mass(0.1f)).tensors[0].total_bytes(), 2 * (4 + 8 * 8));
  EXPECT_EQ(PlanOf(axes, TopK(3)).tensors[0].encoding(), v1::ENCODING_SPARSE_ROWS);
}

TEST(Sparse, OtherTensorsStayDense) {
  v1::Delivery delivery = TopK(1);
  for (const auto& axes :
       std::vector<std::vector<Axis>>{{{"layers", 4, {}}},
                                      {{"input_tokens", 4, {}}, {"states", 2, {}}},
                                      {{"input_tokens", 0, {}}}}) {
    const Plan plan = PlanOf(axes, delivery);
    EXPECT_EQ(plan.tensors[0].encoding(), v1::ENCODING_DENSE);
    EXPECT_EQ(plan.memory_bytes, 0);
  }
  Plan indices;
  indices.tensors.push_back(MakeTensorInfo("i", {{"input_tokens", 4, {}}}, v1::DATA_TYPE_INT32));
  ApplyDelivery(delivery, &indices);
  EXPECT_EQ(indices.tensors[0].encoding(), v1::ENCODING_DENSE);
  EXPECT_EQ(indices.tensors[0].total_bytes(), 16);
}

TEST(Delivery, TheUnfinishedRowOrSlabIsCounted) {
  EXPECT_EQ(PlanOf(kMaps, Uint8()).memory_bytes, 35 * 4);
  EXPECT_GE(PlanOf(kMaps, TopK(2)).memory_bytes, 7 * 4);
  EXPECT_EQ(PlanOf(kMaps, {}).memory_bytes, 0);
}

TEST(DeliveryDeathTest, AnUnfinishedRowIsABrokenInvariant) {
  const Plan plan = PlanOf({{"input_tokens", 4, {}}}, TopK(1));
  CollectingSink sink;
  TensorWriter writer("e", plan.tensors, 1024, &sink, TopK(1));
  writer.Write("t", std::vector<float>{1, 2, 3});
  EXPECT_DEATH(writer.Finish(), "broken invariant");
}

std::vector<std::string> Problems(const v1::Delivery& delivery) {
  Violations violations;
  CheckDelivery(delivery, violations);
  std::vector<std::string> lines;
  for (const auto& [field, text] : violations.list()) lines.push_back(field + ": " + text);
  return lines;
}

TEST(Delivery, EveryFaultIsNamedWithItsLimit) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(Problems({}), IsEmpty());
  EXPECT_THAT(Problems(Uint8()), IsEmpty());
  EXPECT_THAT(Problems(TopK(1, v1::DATA_TYPE_FP16)), IsEmpty());
  EXPECT_THAT(Problems(Threshold(1e-30f)), IsEmpty());
  EXPECT_THAT(Problems(Mass(1)), IsEmpty());
  EXPECT_THAT(Problems(TopK(0)), ElementsAre("delivery.sparse_top_k: 0 is below 1"));
  EXPECT_THAT(Problems(TopK(-3)), ElementsAre("delivery.sparse_top_k: -3 is below 1"));
  EXPECT_THAT(Problems(Threshold(0)),
              ElementsAre("delivery.sparse_threshold: 0 is not above 0 and finite"));
  EXPECT_THAT(Problems(Threshold(kNan)),
              ElementsAre("delivery.sparse_threshold: nan is not above 0 and finite"));
  EXPECT_THAT(Problems(Mass(1.5f)), ElementsAre("delivery.sparse_mass: 1.5 is outside (0, 1]"));
  EXPECT_THAT(Problems(Mass(kNan)), ElementsAre("delivery.sparse_mass: nan is outside (0, 1]"));
  EXPECT_THAT(
      Problems(TopK(2, v1::DATA_TYPE_UINT8)),
      ElementsAre("delivery.sparse_top_k: does not go with DATA_TYPE_UINT8; FP32 and FP16 can be "
                  "sparse"));
  EXPECT_THAT(Problems(TopK(2, v1::DATA_TYPE_INT32)),
              ElementsAre("delivery.dtype: 3 is none of FP32, FP16 and UINT8"));
  v1::Delivery unknown;
  unknown.set_dtype(static_cast<v1::DataType>(17));
  EXPECT_THAT(Problems(unknown), ElementsAre("delivery.dtype: 17 is none of FP32, FP16 and UINT8"));
}

}  // namespace
}  // namespace mambascope::explain
