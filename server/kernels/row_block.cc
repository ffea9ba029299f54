// A task takes a group of channels through all tokens, from the last target back to the first
// token, tile of tokens after tile.
#include "server/kernels/row_block.h"

#include <algorithm>
#include <cstring>

#include "server/base/array.h"
#include "server/base/check.h"
#include "server/kernels/channel_group.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/row_block.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "server/kernels/lane_rows-inl.h"

#ifndef MAMBASCOPE_KERNELS_ROW_BLOCK_ONCE_
#define MAMBASCOPE_KERNELS_ROW_BLOCK_ONCE_
namespace mambascope::kernels {

// Tokens that one register of channels is taken through before the next: their decays stay close
// by, and the states of a few rows in registers.
constexpr int64_t kTileTokens = 16;

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

// One register of channels, from column `c` of a group on: what of it a tile of tokens uses.
struct Tile {
  const ScanParameters& scan;
  const ChannelGroup& group;
  int64_t c, begin, end;
  float* decay;  // [kTileTokens, d_state, kLanes]  exp(delta A)
  float* sum;    // [kTileTokens, kMostRowsInBlock, kLanes] over the states so far
  bool aligned;  // every row's registers
  Vec delta(int64_t j) const { return hn::LoadU(F32(), group.delta(j) + c); }
};

// Past the caches, where that can be: rows are too many to be found there by their reader, and
// fetching their lines first took half of the time (512 tokens of mamba-130m's shape, AVX-512: 1.9
// ms a row instead of 0.9, and 3.6 by TargetRows).
HWY_INLINE void StoreRow(const Tile& tile, Vec value, float* out) {
  if (tile.aligned) {
    hn::Stream(value, F32(), out);
  } else {
    StoreLanes(value, F32(), out, tile.group.count() - tile.c);
  }
}

void FillDecay(const Tile& tile) {
  const F32 d;
  const int64_t states = tile.scan.d_state;
  for (int64_t j = tile.begin; j < tile.end; ++j) {
    const Vec delta = tile.delta(j);
    float* decay = tile.decay + (j - tile.begin) * states * kLanes;
    for (int64_t n = 0; n < states; ++n) {
      const Vec A = hn::LoadU(d, tile.group.A() + n * tile.group.width() + tile.c);
      hn::Store(Exp2NonPositive(d, hn::Mul(delta, A)), d, decay + n * kLanes);
    }
  }
}

// States [n, n + kStates) of the rows [r, r + kRows) through the tile's tokens:
//   sum[j, r] += B[j, n] g[r, n];   g[r, n] *= decay[j, n]
// operation by operation as TargetRows does it. After the last state, `rows` gets delta sum.
template <int kRows, int kStates>
HWY_INLINE void Pass(const Tile& tile, int64_t r, int64_t n, float* g, const RowBlock& block) {
  const F32 d;
  const int64_t states = tile.scan.d_state, stride = block.span() * tile.scan.d_inner;
  const bool first = n == 0, last = n + kStates == states;
  Vec state[kRows][kStates];
  float* const from = g + n * kStateRow + r * kLanes;
  for (int i = 0; i < kRows; ++i) {
    for (int k = 0; k < kStates; ++k) {
      state[i][k] = hn::Load(d, from + k * kStateRow + i * kLanes);
    }
  }
  for (int64_t j = tile.end - 1; j >= tile.begin; --j) {
    const float* B = tile.scan.B + j * tile.scan.bc_stride + n;
    const float* decay = tile.decay + ((j - tile.begin) * states + n) * kLanes;
    float* sums = tile.sum + ((j - tile.begin) * kMostRowsInBlock + r) * kLanes;
    Vec sum[kRows];
    for (int i = 0; i < kRows; ++i) sum[i] = first ? hn::Zero(d) : hn::Load(d, sums + i * kLanes);
    for (int k = 0; k < kStates; ++k) {
      const Vec b = hn::Set(d, B[k]), step = hn::Load(d, decay + k * kLanes);
      for (int i = 0; i < kRows; ++i) {
        sum[i] = hn::MulAdd(b, state[i][k], sum[i]);
        state[i][k] = hn::Mul(state[i][k], step);
      }
    }
    if (last) {
      float* out = block.rows + r * stride + j * tile.scan.d_inner + tile.c;
      for (int i = 0; i < kRows; ++i) {
        StoreRow(tile, hn::Mul(sum[i], tile.delta(j)), out + i * stride);
      }
    } else {
      for (int i = 0; i < kRows; ++i) hn::Store(sum[i], d, sums + i * kLanes);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int k = 0; k < kStates; ++k) {
      hn::Store(state[i][k], d, from + k * kStateRow + i * kLanes);
    }
  }
}

template <int kRows>
HWY_INLINE void Passes(const Tile& tile, int64_t r, float* g, const RowBlock& block) {
  int64_t n = 0;
  for (; n + 4 <= tile.scan.d_state; n += 4) Pass<kRows, 4>(tile, r, n, g, block);
  for (; n < tile.scan.d_state; ++n) Pass<kRows, 1>(tile, r, n, g, block);
}

// All rows from `r` on. g [d_state, kMostRowsInBlock, kLanes].
void RowsFrom(const Tile& tile, int64_t r, float* g, const RowBlock& block) {
  constexpr int kRows = kLanes >= 16 ? 4 : 2;  // as many as registers hold the states of
  for (; r + kRows <= block.count; r += kRows) Passes<kRows>(tile, r, g, block);
  for (; r < block.count; ++r) Passes<1>(tile, r, g, block);
}

// The row of target j begins.
void StartRow(const ScanParameters& scan, int64_t j, int64_t first, float* g) {
  const F32 d;
  for (int64_t n = 0; n < scan.d_state; ++n) {
    hn::Store(hn::Set(d, scan.C[j * scan.bc_stride + n]), d,
              g + n * kStateRow + (j - first) * kLanes);
  }
}

}  // namespace

void RowsOfBlock(const ScanParameters& scan, const ChannelGroup& group, const RowBlock& block) {
  const int64_t registers = (group.count() + kLanes - 1) / kLanes;
  const int64_t states = scan.d_state * kStateRow;
  Array<float> g(registers * states), decay(kTileTokens * scan.d_state * kLanes);
  Array<float> sum(kTileTokens * kStateRow);
  const bool aligned = scan.d_inner % kLanes == 0 &&
                       reinterpret_cast<uintptr_t>(block.rows) % (kLanes * sizeof(float)) == 0;
  for (int64_t end = block.span(); end > 0;) {
    // Rows begin one token after the other; below the first target all go through tiles.
    const bool starts = end > block.first;
    const int64_t begin = starts ? end - 1 : std::max<int64_t>(end - kTileTokens, 0);
    for (int64_t v = 0; v < registers; ++v) {
      const Tile tile = {scan, group, v * kLanes, begin, end, decay.data(), sum.data(), aligned};
      float* const of_register = g.data() + v * states;
      if (starts) StartRow(scan, begin, block.first, of_register);
      FillDecay(tile);
      RowsFrom(tile, std::max<int64_t>(begin - block.first, 0), of_register, block);
    }
    end = begin;
  }
  hwy::FlushStream();  // streamed rows are not ordered before what tells others of them
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
  const int64_t width = scan.d_inner >= 512 ? 128 : 16;
  pool.Run((scan.d_inner + width - 1) / width, [&](int64_t task) {
    const ChannelGroup group(scan, {}, task * width, width);
    HWY_DYNAMIC_DISPATCH(RowsOfBlock)(scan, group, {first, count, rows + task * width});
  });
}

}  // namespace mambascope::kernels
#endif
