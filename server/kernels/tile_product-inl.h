// Products and transposes of small matrices whose rows are whole registers (columns padded with
// zeros to kPad), on the calling thread. Compiled once for each target (so no #pragma once).
#if defined(MAMBASCOPE_KERNELS_TILE_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MAMBASCOPE_KERNELS_TILE_PRODUCT_INL_H_
#undef MAMBASCOPE_KERNELS_TILE_PRODUCT_INL_H_
#else
#define MAMBASCOPE_KERNELS_TILE_PRODUCT_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "server/kernels/lane_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

// Element (m, k) is data[m * row + k * col].
struct Factor {
  const float* data;
  int64_t row, col;
};
inline Factor Plain(const float* data, int64_t stride) { return {data, stride, 1}; }
inline Factor Transposed(const float* data, int64_t stride) { return {data, 1, stride}; }

// Which k a row m of the left factor has that are not zero.
enum class Band { kAll, kUpToRow, kFromRow };  // k <= m; k >= m

// With 16 registers two columns of registers remain beside the factors, with 32 four.
constexpr int kProductVecs = kLanes >= 16 ? 4 : 2;
constexpr int64_t kProductRows = 4;

// c [kRows, kVecs registers] (+)= a b over k in [begin, end), a sum in the order of k.
template <int kRows, int kVecs>
void TileProduct(Factor a, const float* b, int64_t b_stride, int64_t begin, int64_t end,
                 bool accumulate, float* c, int64_t c_stride) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec sum[kRows][kVecs];
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      sum[m][v] = accumulate ? hn::Load(d, c + m * c_stride + v * lanes) : hn::Zero(d);
    }
  }
  for (int64_t k = begin; k < end; ++k) {
    const float *a_k = a.data + k * a.col, *b_k = b + k * b_stride;
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const Vec factor = hn::Set(d, a_k[m * a.row]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        sum[m][v] = hn::MulAdd(factor, hn::Load(d, b_k + v * lanes), sum[m][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) hn::Store(sum[m][v], d, c + m * c_stride + v * lanes);
  }
}

template <int kVecs>
void ColumnProduct(Factor a, Band band, const float* b, int64_t b_stride, int64_t M, int64_t K,
                   bool accumulate, float* c, int64_t c_stride) {
  const auto begin = [&](int64_t m) { return band == Band::kFromRow ? m : int64_t{0}; };
  const auto end = [&](int64_t m) { return band == Band::kUpToRow ? std::min(K, m + 1) : K; };
  int64_t m = 0;
  for (; m + kProductRows <= M; m += kProductRows) {
    const Factor rows{a.data + m * a.row, a.row, a.col};
    TileProduct<kProductRows, kVecs>(rows, b, b_stride, begin(m), end(m + kProductRows - 1),
                                     accumulate, c + m * c_stride, c_stride);
  }
  for (; m < M; ++m) {
    const Factor row{a.data + m * a.row, a.row, a.col};
    TileProduct<1, kVecs>(row, b, b_stride, begin(m), end(m), accumulate, c + m * c_stride,
                          c_stride);
  }
}

// c [M, cols] (+)= a [M, K] b [K, cols]; cols is a multiple of kPad. Outside its band `a` holds
// zeros, which are left out where whole tiles of rows have them. Every element is one sum in the
// order of k.
inline void Product(Factor a, Band band, const float* b, int64_t b_stride, int64_t M, int64_t cols,
                    int64_t K, bool accumulate, float* c, int64_t c_stride) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  int64_t at = 0;
  for (; at + kProductVecs * lanes <= cols; at += kProductVecs * lanes) {
    ColumnProduct<kProductVecs>(a, band, b + at, b_stride, M, K, accumulate, c + at, c_stride);
  }
  for (; at < cols; at += lanes) {
    ColumnProduct<1>(a, band, b + at, b_stride, M, K, accumulate, c + at, c_stride);
  }
}

// to [cols, rows] = from [rows, cols]; both counts are multiples of kPad.
inline void Transpose(const float* from, int64_t from_stride, int64_t rows, int64_t cols, float* to,
                      int64_t to_stride) {
  const F32 d;
  for (int64_t row = 0; row < rows; row += kLanes) {
    for (int64_t col = 0; col < cols; col += kLanes) {
      Vec v[kLanes];
      for (int k = 0; k < kLanes; ++k) v[k] = hn::Load(d, from + (row + k) * from_stride + col);
      Transpose(v);
      for (int k = 0; k < kLanes; ++k) hn::Store(v[k], d, to + (col + k) * to_stride + row);
    }
  }
}

// sum a[k] b[k]; count is a multiple of kPad.
inline float Dot(const float* a, const float* b, int64_t count) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  int64_t k = 0;
  for (; k + 4 * lanes <= count; k += 4 * lanes) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      sum[s] = hn::MulAdd(hn::Load(d, a + k + s * lanes), hn::Load(d, b + k + s * lanes), sum[s]);
    }
  }
  for (; k < count; k += lanes) sum[0] = hn::MulAdd(hn::Load(d, a + k), hn::Load(d, b + k), sum[0]);
  const Vec total = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
  return hn::GetLane(hn::SumOfLanes(d, total));
}

// to[k] = scale from[k], and to[k] += from[k]; counts are multiples of kPad.
inline void Scale(float scale, const float* from, int64_t count, float* to) {
  const F32 d;
  for (int64_t k = 0; k < count; k += hn::Lanes(d)) {
    hn::Store(hn::Mul(hn::Set(d, scale), hn::Load(d, from + k)), d, to + k);
  }
}
inline void AddTo(const float* from, int64_t count, float* to) {
  const F32 d;
  for (int64_t k = 0; k < count; k += hn::Lanes(d)) {
    hn::Store(hn::Add(hn::Load(d, to + k), hn::Load(d, from + k)), d, to + k);
  }
}
// to[k] = a[k] b[k]
inline void Multiply(const float* a, const float* b, int64_t count, float* to) {
  const F32 d;
  for (int64_t k = 0; k < count; k += hn::Lanes(d)) {
    hn::Store(hn::Mul(hn::Load(d, a + k), hn::Load(d, b + k)), d, to + k);
  }
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
