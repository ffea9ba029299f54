// Register tiles of hidden-attention maps, compiled once for each target (so no #pragma once).
//
// A block of a map is left right^T, where a row i of `left` holds C decayed back to the border
// between the two and a column j of `right` holds Bbar decayed up to it. Both are stored as tiles
// read them: `left` in blocks of kBase rows, [depth / kLanes, kBase, kLanes], so that a tile's rows
// are a constant apart and are written register by register; `right` in panels of kPanel columns,
// [depth, kPanel], so that a register holds neighbouring columns. depth = states x channels, and
// element (state n, channel c) is number n * channels + c.
#if defined(MAMBASCOPE_KERNELS_MAP_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MAMBASCOPE_KERNELS_MAP_TILE_INL_H_
#undef MAMBASCOPE_KERNELS_MAP_TILE_INL_H_
#else
#define MAMBASCOPE_KERNELS_MAP_TILE_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "server/kernels/lane_rows-inl.h"
#include "server/kernels/map_layout.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

static_assert(kBase % kLanes == 0);
constexpr int64_t kGroupSize = kBase * kLanes;  // numbers of one register of depth and kBase rows

// Registers of columns in a tile. AVX-512 has 32 registers: 24 sums, their four columns and a
// broadcast row fit; others get by with 16. Magnitudes keep two sums for each element.
template <Reduce kReduce>
constexpr int kVecs = kReduce == Reduce::kSum && kLanes >= 16 ? 4 : 2;
// Columns of a panel: as many as a tile has.
template <Reduce kReduce>
constexpr int64_t kPanel = std::max<int64_t>(kBase, kVecs<kReduce>* kLanes);
static_assert(kPanel<Reduce::kSum> <= kWidestPanel);

// out[r, :] += left[r] . right for kRows rows and kCols registers of columns, over `groups`
// registers of depth, whose first `lanes` lanes are not zero; rows from `rows` on are not written.
template <int kRows, int kCols>
HWY_INLINE void SumTile(const float* left, const float* right, int64_t groups, int lanes,
                        int64_t rows, float* out, int64_t stride) {
  const F32 d;
  Vec sum[kRows][kCols];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kCols; ++v) sum[r][v] = hn::Zero(d);
  }
  constexpr int64_t kWidth = kPanel<Reduce::kSum>;
  for (int64_t g = 0; g < groups; ++g, left += kGroupSize, right += kLanes * kWidth) {
    for (int k = 0; k < lanes; ++k) {
      Vec column[kCols];
      for (int v = 0; v < kCols; ++v) column[v] = hn::Load(d, right + k * kWidth + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec row = hn::Set(d, left[r * kLanes + k]);
        for (int v = 0; v < kCols; ++v) sum[r][v] = hn::MulAdd(row, column[v], sum[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
    for (int v = 0; v < kCols; ++v) {
      float* to = out + r * stride + v * kLanes;
      hn::StoreU(hn::Add(hn::LoadU(d, to), sum[r][v]), d, to);
    }
  }
}

// The same for the kBase rows of a block of `left`.
template <int kCols>
HWY_INLINE void SumBase(const float* left, const float* right, int64_t groups, int lanes,
                        int64_t rows, float* out, int64_t stride) {
  const auto tile = [&]<int kFirst, int kRows>() {
    SumTile<kRows, kCols>(left + kFirst * kLanes, right, groups, lanes, rows - kFirst,
                          out + kFirst * stride, stride);
  };
  if constexpr (kLanes >= 16 && kCols == 1) {
    tile.template operator()<0, 16>();
  } else if constexpr (kLanes >= 16 && kCols == 2) {
    tile.template operator()<0, 8>();
    tile.template operator()<8, 8>();
  } else {
    tile.template operator()<0, 6>();
    tile.template operator()<6, 5>();
    tile.template operator()<11, 5>();
  }
}

// alpha of one channel for a tile.
template <int kRows, int kCols>
HWY_INLINE void ChannelTile(const float* left, const float* right, const Depth& depth, int64_t c,
                            Vec (&alpha)[kRows][kCols]) {
  const F32 d;
  const int64_t size = depth.size();
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kCols; ++v) alpha[r][v] = hn::Zero(d);
  }
  left += c / kLanes * kGroupSize + c % kLanes;
  for (int64_t k = c; k < size; k += depth.channels, left += depth.channels * kBase) {
    Vec column[kCols];
    for (int v = 0; v < kCols; ++v) {
      column[v] = hn::Load(d, right + k * kPanel<Reduce::kMass> + v * kLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec row = hn::Set(d, left[r * kLanes]);
      for (int v = 0; v < kCols; ++v) alpha[r][v] = hn::MulAdd(row, column[v], alpha[r][v]);
    }
  }
}

// out[r, :] += sum over channels of |alpha|.
template <int kRows, int kCols>
HWY_INLINE void MagnitudeTile(const float* left, const float* right, const Depth& depth,
                              int64_t rows, float* out, int64_t stride) {
  const F32 d;
  Vec sum[kRows][kCols], alpha[kRows][kCols];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kCols; ++v) sum[r][v] = hn::Zero(d);
  }
  for (int64_t c = 0; c < depth.channels; ++c) {
    ChannelTile(left, right, depth, c, alpha);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kCols; ++v) sum[r][v] = hn::Add(sum[r][v], hn::Abs(alpha[r][v]));
    }
  }
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
    for (int v = 0; v < kCols; ++v) {
      float* to = out + r * stride + v * kLanes;
      hn::StoreU(hn::Add(hn::LoadU(d, to), sum[r][v]), d, to);
    }
  }
}

// mass[c, lane] += sum over the tile of |alpha of channel c|; rows that are not there are zero.
template <int kRows, int kCols>
HWY_INLINE void MassTile(const float* left, const float* right, const Depth& depth, float* mass) {
  const F32 d;
  Vec alpha[kRows][kCols];
  for (int64_t c = 0; c < depth.channels; ++c) {
    ChannelTile(left, right, depth, c, alpha);
    Vec sum = hn::Load(d, mass + c * kWidest);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kCols; ++v) sum = hn::Add(sum, hn::Abs(alpha[r][v]));
    }
    hn::Store(sum, d, mass + c * kWidest);
  }
}

template <Reduce kReduce, int kCols>
HWY_INLINE void MagnitudesOfBase(const float* left, const float* right, const Depth& depth,
                                 int64_t rows, float* out, int64_t stride) {
  constexpr int kMassRows = kLanes >= 16 ? 8 : 4;
  constexpr int kRows = kReduce == Reduce::kMass ? kMassRows : kMassRows / 2;
  for (int64_t r = 0; r < std::min(rows, kBase); r += kRows) {
    if constexpr (kReduce == Reduce::kMass) {
      MassTile<kRows, kCols>(left + r * kLanes, right, depth, out);
    } else {
      MagnitudeTile<kRows, kCols>(left + r * kLanes, right, depth, rows - r, out + r * stride,
                                  stride);
    }
  }
}

// Registers of depth that are multiplied at a time: that much of a panel stays in the first cache
// for all rows, and a tile's sums are long enough.
constexpr int64_t kSliceGroups = 128 / kLanes;

// out[0..rows, 0..kCols registers) += the block of the map.
template <Reduce kReduce, int kCols>
HWY_INLINE void MultiplyColumns(const float* left, const float* right, const Depth& depth,
                                int64_t rows, float* out, int64_t stride) {
  const int64_t size = depth.size();
  if constexpr (kReduce == Reduce::kSum) {
    const int lanes = depth.channels == kLanes ? static_cast<int>(depth.live) : kLanes;
    for (int64_t g = 0; g < size / kLanes; g += kSliceGroups) {
      const float* slice = right + g * kLanes * kPanel<kReduce>;
      const int64_t groups = std::min(kSliceGroups, size / kLanes - g);
      for (int64_t i = 0; i < rows; i += kBase) {
        SumBase<kCols>(left + i * size + g * kGroupSize, slice, groups, lanes, rows - i,
                       out + i * stride, stride);
      }
    }
  } else {
    for (int64_t i = 0; i < rows; i += kBase) {
      float* to = kReduce == Reduce::kMass ? out : out + i * stride;
      MagnitudesOfBase<kReduce, kCols>(left + i * size, right, depth, rows - i, to, stride);
    }
  }
}

// out[0..rows, 0..columns) += the block of the map. `rows` may end inside a base block, whose
// remaining rows are zero in `left`. `columns` is kBase times a power of two, and `right` points at
// the first in its panel.
template <Reduce kReduce>
void Multiply(const float* left, const float* right, const Depth& depth, int64_t rows,
              int64_t columns, float* out, int64_t stride) {
  for (int64_t j = 0; j < columns; j += kPanel<kReduce>) {
    const float* panel = right + j * depth.size();
    const int64_t vecs = std::min(columns - j, kPanel<kReduce>) / kLanes;
    const auto multiply = [&]<int kCols>(int64_t v) {
      float* to = kReduce == Reduce::kMass ? out : out + j + v * kLanes;
      MultiplyColumns<kReduce, kCols>(left, panel + v * kLanes, depth, rows, to, stride);
    };
    int64_t v = 0;
    if constexpr (kVecs<kReduce> == 4) {
      for (; v + 4 <= vecs; v += 4) multiply.template operator()<4>(v);
    }
    for (; v + 2 <= vecs; v += 2) multiply.template operator()<2>(v);
    for (; v < vecs; ++v) multiply.template operator()<1>(v);
  }
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
