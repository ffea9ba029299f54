#include "server/kernels/cuda/embedding.h"

#include <bit>
#include <vector>

#include "tests/gpu/device.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels::cuda {
namespace {

using reference::Random;
using reference::SameBits;

class Embedding : public DeviceTest {};

std::vector<Bf16> Narrowed(const std::vector<float>& wide) {
  std::vector<Bf16> narrow;
  for (const float v : wide) narrow.push_back(std::bit_cast<uint32_t>(v) >> 16);
  return narrow;
}

std::vector<float> Widened(const std::vector<Bf16>& narrow) {
  std::vector<float> wide;
  for (const Bf16 v : narrow) wide.push_back(std::bit_cast<float>(uint32_t{v} << 16));
  return wide;
}

TEST_F(Embedding, EachRowIsItsTokens) {
  constexpr int64_t kRows = 50, kCols = 777;
  const std::vector<float> table = Random(kRows * kCols, 1);
  const std::vector<int32_t> tokens = {7, 49, 0, 7, 31};
  std::vector<float> expected;
  for (const int32_t token : tokens) {
    expected.insert(expected.end(), table.begin() + token * kCols,
                    table.begin() + (token + 1) * kCols);
  }
  auto h = OnDevice<float>(tokens.size() * kCols);
  ASSERT_TRUE(GatherRows(ToDevice(table).data(), ToDevice(tokens).data(), tokens.size(), kCols,
                         h.data(), stream())
                  .ok());
  EXPECT_TRUE(SameBits(ToHost(h), expected));
}

TEST_F(Embedding, Bf16RowsAreWidenedExactly) {
  constexpr int64_t kRows = 3, kCols = 130;
  const std::vector<Bf16> table = Narrowed(Random(kRows * kCols, 2, -1e30f, 1e30f));
  auto h = OnDevice<float>(kRows * kCols);
  ASSERT_TRUE(GatherRows(ToDevice(table).data(), ToDevice(std::vector<int32_t>{0, 1, 2}).data(),
                         kRows, kCols, h.data(), stream())
                  .ok());
  EXPECT_TRUE(SameBits(ToHost(h), Widened(table)));
}

TEST_F(Embedding, WideningCoversEveryElement) {
  const std::vector<Bf16> narrow = Narrowed(Random(kEmulated ? 300'001 : 5'000'001, 3));
  auto wide = OnDevice<float>(narrow.size());
  ASSERT_TRUE(Widen(ToDevice(narrow).data(), narrow.size(), wide.data(), stream()).ok());
  EXPECT_TRUE(SameBits(ToHost(wide), Widened(narrow)));
}

}  // namespace
}  // namespace mambascope::kernels::cuda
