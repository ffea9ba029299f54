// A task takes a group of channels through all tokens, from the last target back to the first
// token; the states of one register of channels stay in the first cache for a tile of tokens.
#include "server/kernels/row_block.h"

#include <algorithm>
#include <cstring>

#include "server/base/array.h"
#include "server/base/check.h"
#include "server/kernels/channel_group.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/row_block.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/lane_rows-inl.h"

#ifndef MAMBASCOPE_KERNELS_ROW_BLOCK_ONCE_
#define MAMBASCOPE_KERNELS_ROW_BLOCK_ONCE_
namespace mambascope::kernels {

// Tokens that one register of channels is taken through before the next: a line of each row is
// written to its own page, and the group's other lines of it soon after.
constexpr int64_t kTileTokens = 8;

struct RowBlock {
  int64_t first, count;  // targets
  float* rows;           // the group's first channel of the first row
  int64_t span() const { return first + count; }
};

}  // namespace mambascope::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

constexpr int64_t kStateRow = kMostRowsInBlock * kLanes;  // one state of all rows

// The tokens' part of one register of channels that all rows share.
struct Token {
  const float* B;      // [d_state]
  const float* decay;  // [d_state, kLanes]
  Vec delta;
  int64_t d_state;
};

// kRows rows of one token: out[r] = delta sum_n B[n] g[r, n], and g[r, n] *= decay[n], operation by
// operation as TargetRows does it. g points at the first row; rows of `out` are `stride` apart.
template <int kRows>
HWY_INLINE void Step(const Token& token, float* g, float* out, int64_t stride, int64_t channels) {
  const F32 d;
  Vec sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = hn::Zero(d);
  for (int64_t n = 0; n < token.d_state; ++n) {
    const Vec B = hn::Set(d, token.B[n]);
    const Vec decay = hn::Load(d, token.decay + n * kLanes);
    float* row = g + n * kStateRow;
    for (int r = 0; r < kRows; ++r) {
      const Vec now = hn::Load(d, row + r * kLanes);
      sum[r] = hn::MulAdd(B, now, sum[r]);
      hn::Store(hn::Mul(now, decay), d, row + r * kLanes);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    StoreLanes(hn::Mul(sum[r], token.delta), d, out + r * stride, channels);
  }
}

// The rows [begin, count) of one token.
HWY_INLINE void Steps(const Token& token, int64_t begin, int64_t count, float* g, float* out,
                      int64_t stride, int64_t channels) {
  int64_t r = begin;
  const auto steps = [&]<int kRows>() {
    for (; r + kRows <= count; r += kRows) {
      Step<kRows>(token, g + r * kLanes, out + r * stride, stride, channels);
    }
  };
  steps.template operator()<8>();
  steps.template operator()<4>();
  steps.template operator()<1>();
}

// Tokens [begin, end) of the register of channels from `c` on. g [d_state, kMostRowsInBlock,
// kLanes]; decay [d_state, kLanes] is scratch.
void TileOfRows(const ScanParameters& scan, const ChannelGroup& group, int64_t width,
                const RowBlock& block, int64_t c, int64_t begin, int64_t end, float* g,
                float* decay) {
  const F32 d;
  for (int64_t j = end - 1; j >= begin; --j) {
    if (j >= block.first) {  // a row begins at its target
      const float* C = scan.C + j * scan.bc_stride;
      float* row = g + (j - block.first) * kLanes;
      for (int64_t n = 0; n < scan.d_state; ++n) {
        hn::Store(hn::Set(d, C[n]), d, row + n * kStateRow);
      }
    }
    const Vec delta = hn::LoadU(d, group.delta(j) + c);
    for (int64_t n = 0; n < scan.d_state; ++n) {
      const Vec A = hn::LoadU(d, group.A() + n * width + c);
      hn::Store(Exp2NonPositive(d, hn::Mul(delta, A)), d, decay + n * kLanes);
    }
    Steps({scan.B + j * scan.bc_stride, decay, delta, scan.d_state},
          std::max<int64_t>(j - block.first, 0), block.count, g, block.rows + j * scan.d_inner + c,
          block.span() * scan.d_inner, group.count() - c);
  }
}

}  // namespace

void RowsOfBlock(const ScanParameters& scan, const ChannelGroup& group, int64_t width,
                 const RowBlock& block) {
  const int64_t registers = (group.count() + kLanes - 1) / kLanes;
  const int64_t states = scan.d_state * kStateRow;
  Array<float> g(registers * states), decay(scan.d_state * kLanes);
  for (int64_t end = block.span(); end > 0; end -= kTileTokens) {
    const int64_t begin = std::max<int64_t>(end - kTileTokens, 0);
    for (int64_t v = 0; v < registers; ++v) {
      TileOfRows(scan, group, width, block, v * kLanes, begin, end, g.data() + v * states,
                 decay.data());
    }
  }
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(RowsOfBlock);

}  // namespace

void TargetRowBlock(ThreadPool& pool, const ScanParameters& scan, int64_t first, int64_t count,
                    float* rows) {
  MS_CHECK(1 <= count && count <= kMostRowsInBlock);
  MS_CHECK(0 <= first && first + count <= scan.tokens);
  const int64_t row_size = (first + count) * scan.d_inner;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t after = (count - 1 - r) * scan.d_inner;  // tokens after the row's target
    std::memset(rows + (r + 1) * row_size - after, 0, after * sizeof(float));
  }
  // Each token's delta is a page of its own when d_inner is large: then several lines of it.
  const int64_t width = scan.d_inner >= 512 ? 64 : 16;
  pool.Run((scan.d_inner + width - 1) / width, [&](int64_t task) {
    const ChannelGroup group(scan, {}, task * width, width);
    HWY_DYNAMIC_DISPATCH(RowsOfBlock)(scan, group, width, {first, count, rows + task * width});
  });
}

}  // namespace mambascope::kernels
#endif
