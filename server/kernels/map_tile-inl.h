// Register tiles of hidden-attention maps, compiled once for each target (so no #pragma once).
//
// A block of a map is left right^T, where a row i of `left` [rows, depth] holds C decayed back to
// the border between the two and a column j of `right` holds Bbar decayed up to it. `right` is
// packed in panels of kPanel columns, [depth, kPanel], so that a register holds neighbouring
// columns. depth = states x channels, and element (state n, channel c) stands at n * channels + c.
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

// With 32 registers, 16 sums, their two columns and a broadcast row fit; with 16 registers, half.
constexpr int kTileRows = kLanes >= 16 ? 8 : 4;

// out[r, :] += left[r] . right for kVecs registers of columns; rows from `rows` on are not written.
template <int kRows, int kVecs>
HWY_INLINE void SumTile(const float* left, const float* right, const Depth& depth, int64_t rows,
                        float* out, int64_t stride) {
  const F32 d;
  const int64_t size = depth.size();
  Vec sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) sum[r][v] = hn::Zero(d);
  }
  for (int64_t k = 0; k < size; ++k) {
    Vec column[kVecs];
    for (int v = 0; v < kVecs; ++v) column[v] = hn::Load(d, right + k * kPanel + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec row = hn::Set(d, left[r * size + k]);
      for (int v = 0; v < kVecs; ++v) sum[r][v] = hn::MulAdd(row, column[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
    for (int v = 0; v < kVecs; ++v) {
      float* to = out + r * stride + v * kLanes;
      hn::StoreU(hn::Add(hn::LoadU(d, to), sum[r][v]), d, to);
    }
  }
}

// alpha of one channel for a tile.
template <int kRows, int kVecs>
HWY_INLINE void ChannelTile(const float* left, const float* right, const Depth& depth, int64_t c,
                            Vec (&alpha)[kRows][kVecs]) {
  const F32 d;
  const int64_t size = depth.size();
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) alpha[r][v] = hn::Zero(d);
  }
  for (int64_t k = c; k < size; k += depth.channels) {
    Vec column[kVecs];
    for (int v = 0; v < kVecs; ++v) column[v] = hn::Load(d, right + k * kPanel + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec row = hn::Set(d, left[r * size + k]);
      for (int v = 0; v < kVecs; ++v) alpha[r][v] = hn::MulAdd(row, column[v], alpha[r][v]);
    }
  }
}

// out[r, :] += sum over channels of |alpha|.
template <int kRows, int kVecs>
HWY_INLINE void MagnitudeTile(const float* left, const float* right, const Depth& depth,
                              int64_t rows, float* out, int64_t stride) {
  const F32 d;
  Vec sum[kRows][kVecs], alpha[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) sum[r][v] = hn::Zero(d);
  }
  for (int64_t c = 0; c < depth.channels; ++c) {
    ChannelTile(left, right, depth, c, alpha);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) sum[r][v] = hn::Add(sum[r][v], hn::Abs(alpha[r][v]));
    }
  }
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
    for (int v = 0; v < kVecs; ++v) {
      float* to = out + r * stride + v * kLanes;
      hn::StoreU(hn::Add(hn::LoadU(d, to), sum[r][v]), d, to);
    }
  }
}

// mass[c, lane] += sum over the tile of |alpha of channel c|; rows that are not there are zero.
template <int kRows, int kVecs>
HWY_INLINE void MassTile(const float* left, const float* right, const Depth& depth, float* mass) {
  const F32 d;
  Vec alpha[kRows][kVecs];
  for (int64_t c = 0; c < depth.channels; ++c) {
    ChannelTile(left, right, depth, c, alpha);
    Vec sum = hn::Load(d, mass + c * kWidest);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) sum = hn::Add(sum, hn::Abs(alpha[r][v]));
    }
    hn::Store(sum, d, mass + c * kWidest);
  }
}

template <Reduce kReduce, int kVecs>
HWY_INLINE void Tile(const float* left, const float* right, const Depth& depth, int64_t rows,
                     float* out, int64_t stride) {
  if constexpr (kReduce == Reduce::kSum) {
    SumTile<kTileRows, kVecs>(left, right, depth, rows, out, stride);
  } else if constexpr (kReduce == Reduce::kMagnitude) {
    constexpr int kRows = kTileRows / 2;  // two sums for each element
    MagnitudeTile<kRows, kVecs>(left, right, depth, rows, out, stride);
    MagnitudeTile<kRows, kVecs>(left + kRows * depth.size(), right, depth, rows - kRows,
                                out + kRows * stride, stride);
  } else {
    MassTile<kTileRows, kVecs>(left, right, depth, out);
  }
}

// out[0..rows, 0..columns) += the block of the map. `rows` may end inside a tile: `left` has zeros
// there. `columns` is kBase or a multiple of kPanel, and `right` points at the first in its panel.
template <Reduce kReduce>
void Multiply(const float* left, const float* right, const Depth& depth, int64_t rows,
              int64_t columns, float* out, int64_t stride) {
  constexpr int kVecs = 2 * kLanes <= kPanel ? 2 : 1;
  for (int64_t j = 0; j < columns; j += kPanel) {
    const float* panel = right + j * depth.size();  // stays in the first cache for all rows
    const int64_t width = std::min(columns - j, kPanel);
    int64_t v = 0;
    for (; v + kVecs * kLanes <= width; v += kVecs * kLanes) {
      for (int64_t i = 0; i < rows; i += kTileRows) {
        float* to = kReduce == Reduce::kMass ? out : out + i * stride + j + v;
        Tile<kReduce, kVecs>(left + i * depth.size(), panel + v, depth, rows - i, to, stride);
      }
    }
    for (; v < width; v += kLanes) {
      for (int64_t i = 0; i < rows; i += kTileRows) {
        float* to = kReduce == Reduce::kMass ? out : out + i * stride + j + v;
        Tile<kReduce, 1>(left + i * depth.size(), panel + v, depth, rows - i, to, stride);
      }
    }
  }
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
