#include "server/kernels/row_block.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "server/base/array.h"
#include "tests/support/reference_attention.h"
#include "tests/support/reference_kernels.h"

namespace mambascope::kernels {
namespace {

using reference::Close;
using reference::OnEveryTarget;
using reference::RandomScan;
using reference::SameBits;

// Of rows on a register's boundary, which are written past the caches, and of others.
std::vector<float> Block(ThreadPool& pool, const ScanParameters& scan, int64_t first, int64_t count,
                         int64_t offset = 0) {
  const int64_t size = count * (first + count) * scan.d_inner;
  Array<float> rows(offset + size);
  std::fill(rows.begin(), rows.end(), 12345.0f);
  TargetRowBlock(pool, scan, first, count, rows.data() + offset);
  return {rows.data() + offset, rows.data() + offset + size};
}

std::vector<int32_t> All(int64_t count) {
  std::vector<int32_t> all(count);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

struct Shape {
  int64_t tokens, d_inner, d_state;
};
const Shape kShapes[] = {{1, 1, 1},     {2, 3, 5},   {9, 17, 16}, {40, 70, 4},
                         {33, 24, 128}, {50, 16, 3}, {21, 515, 2}};

// Calls test(scan, first, count) for blocks at the start, in the middle and at the end.
template <class Test>
void OnEveryBlock(const Test& test) {
  uint32_t seed = 0;
  for (const Shape& shape : kShapes) {
    const RandomScan random(shape.tokens, shape.d_inner, shape.d_state, ++seed);
    for (const int64_t count : {1, 2, 7, 8, 13, 16}) {
      if (count > shape.tokens) continue;
      for (const int64_t first : {int64_t{0}, (shape.tokens - count) / 2, shape.tokens - count}) {
        SCOPED_TRACE(testing::Message() << shape.tokens << " tokens, " << shape.d_inner
                                        << " channels, " << shape.d_state << " states, targets ["
                                        << first << ", " << first + count << ")");
        test(random.parameters, first, count);
      }
    }
  }
}

TEST(RowBlock, RowsAreThoseOfTheChannelMaps) {
  ThreadPool pool(2);
  OnEveryBlock([&](const ScanParameters& scan, int64_t first, int64_t count) {
    const int64_t L = scan.tokens, D = scan.d_inner, span = first + count;
    std::vector<float> maps(D * L * L);
    ChannelMaps(pool, scan, All(D), maps.data());
    std::vector<double> expected(count * span * D);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t j = 0; j < span; ++j) {
        for (int64_t d = 0; d < D; ++d) {
          expected[(r * span + j) * D + d] = maps[(d * L + first + r) * L + j];
        }
      }
    }
    OnEveryTarget([&] { EXPECT_TRUE(Close(Block(pool, scan, first, count), expected)); });
  });
}

TEST(RowBlock, ARowHasTheBitsOfItsTargetAlone) {
  ThreadPool pool(2);
  OnEveryBlock([&](const ScanParameters& scan, int64_t first, int64_t count) {
    const int64_t size = (first + count) * scan.d_inner;
    OnEveryTarget([&] {
      const std::vector<float> block = Block(pool, scan, first, count);
      for (int64_t r = 0; r < count; ++r) {
        std::vector<float> row(scan.tokens * scan.d_inner);
        TargetRows(pool, scan, first + r, false, row.data());
        EXPECT_TRUE(SameBits(std::span(block).subspan(r * size, size), std::span(row).first(size)));
      }
    });
  });
}

TEST(RowBlock, NeitherThreadsNorAlignmentChangeABit) {
  ThreadPool one(1), two(2), five(5);
  OnEveryBlock([&](const ScanParameters& scan, int64_t first, int64_t count) {
    const std::vector<float> alone = Block(one, scan, first, count);
    EXPECT_TRUE(SameBits(Block(two, scan, first, count), alone));
    EXPECT_TRUE(SameBits(Block(two, scan, first, count, /*offset=*/1), alone));
    EXPECT_TRUE(SameBits(Block(five, scan, first, count), alone));
  });
}

}  // namespace
}  // namespace mambascope::kernels
