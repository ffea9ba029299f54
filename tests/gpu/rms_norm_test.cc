#include "server/kernels/cuda/rms_norm.h"

#include <vector>

#include "tests/gpu/device.h"
#include "tests/support/scalar_kernels.h"

namespace mambascope::kernels::cuda {
namespace {

using reference::Random;
using reference::SameBits;

constexpr float kEps = 1e-5f;

class Norms : public DeviceTest {};

std::vector<float> Reference(std::vector<float> h, const float* weight, int64_t rows, int64_t cols,
                             int64_t groups, int64_t stride) {
  Flushed([&] { scalar::RmsNorm(h.data(), weight, kEps, rows, cols, groups, stride, h.data()); });
  return h;
}

TEST_F(Norms, EqualTheReferenceForEveryWidth) {
  for (const int64_t cols : {1, 3, 16, 48, 511, 512, 513, 768, 2560, 8190}) {
    SCOPED_TRACE(cols);
    constexpr int64_t kRows = 5;
    const auto h = Random(kRows * cols, 1), weight = Random(cols, 2);
    auto u = OnDevice<float>(kRows * cols);
    ASSERT_TRUE(
        RmsNorm(ToDevice(h).data(), ToDevice(weight).data(), kEps, kRows, cols, u.data(), stream())
            .ok());
    EXPECT_TRUE(LikeReference(ToHost(u), Reference(h, weight.data(), kRows, cols, 1, cols)));
  }
}

TEST_F(Norms, ARowDoesNotDependOnItsNeighbours) {
  constexpr int64_t kRows = 33, kCols = 768;
  const auto h = Random(kRows * kCols, 3), weight = Random(kCols, 4);
  const auto device_weight = ToDevice(weight);
  auto all = OnDevice<float>(kRows * kCols), one = OnDevice<float>(kCols);
  ASSERT_TRUE(
      RmsNorm(ToDevice(h).data(), device_weight.data(), kEps, kRows, kCols, all.data(), stream())
          .ok());
  const std::vector<float> together = ToHost(all);
  for (const int64_t row : {0, 7, 32}) {
    const std::vector<float> alone(h.begin() + row * kCols, h.begin() + (row + 1) * kCols);
    ASSERT_TRUE(
        RmsNorm(ToDevice(alone).data(), device_weight.data(), kEps, 1, kCols, one.data(), stream())
            .ok());
    EXPECT_TRUE(SameBits(ToHost(one), {together.data() + row * kCols, kCols}));
  }
}

TEST_F(Norms, TheFusedAddGivesTheTwoStepsBits) {
  for (const int64_t cols : {30, 768}) {
    constexpr int64_t kRows = 9;
    const auto h = Random(kRows * cols, 5), out = Random(kRows * cols, 6), w = Random(cols, 7);
    const auto device_out = ToDevice(out), device_w = ToDevice(w);
    auto fused = ToDevice(h), fused_u = OnDevice<float>(kRows * cols);
    ASSERT_TRUE(AddRmsNorm(device_out.data(), device_w.data(), kEps, kRows, cols, fused.data(),
                           fused_u.data(), stream())
                    .ok());
    auto added = ToDevice(h), u = OnDevice<float>(kRows * cols);
    ASSERT_TRUE(AddInPlace(device_out.data(), kRows * cols, added.data(), stream()).ok());
    ASSERT_TRUE(RmsNorm(added.data(), device_w.data(), kEps, kRows, cols, u.data(), stream()).ok());
    EXPECT_TRUE(SameBits(ToHost(fused), ToHost(added)));
    EXPECT_TRUE(SameBits(ToHost(fused_u), ToHost(u)));
  }
}

TEST_F(Norms, GroupsHaveScalesOfTheirOwn) {
  for (const int64_t groups : {1, 2, 8}) {
    constexpr int64_t kRows = 4, kCols = 1536;
    const auto g = Random(kRows * kCols, 8), weight = Random(kCols, 9);
    auto out = ToDevice(g);
    ASSERT_TRUE(GroupRmsNorm(out.data(), ToDevice(weight).data(), kEps, kRows, kCols, groups,
                             out.data(), stream())
                    .ok());
    EXPECT_TRUE(
        LikeReference(ToHost(out), Reference(g, weight.data(), kRows, kCols, groups, kCols)));
  }
}

TEST_F(Norms, PartsOfARowAreScaledAndTheRestStays) {
  for (const int64_t rank : {48, 600}) {
    constexpr int64_t kRows = 6, kStates = 16;
    const int64_t stride = rank + 2 * kStates + 3;
    const auto v = Random(kRows * stride, 10);
    auto device = ToDevice(v);
    const RowPart parts[] = {{0, rank}, {rank, kStates}, {rank + kStates, kStates}};
    ASSERT_TRUE(RmsScaleInPlace(device.data(), kRows, stride, parts, kEps, stream()).ok());
    std::vector<float> expected = v;
    for (const RowPart& part : parts) {
      Flushed([&] {
        float* first = expected.data() + part.begin;
        scalar::RmsNorm(first, nullptr, kEps, kRows, part.cols, 1, stride, first);
      });
    }
    EXPECT_TRUE(LikeReference(ToHost(device), expected));
  }
}

}  // namespace
}  // namespace mambascope::kernels::cuda
