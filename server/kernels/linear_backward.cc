#include "server/kernels/linear_backward.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "server/base/check.h"
#include "server/kernels/gemm_parts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/linear_backward.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/gemm_columns-inl.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

HWY_INLINE Vec LoadWidened(F32 d, const float* p) { return hn::LoadU(d, p); }
HWY_INLINE Vec LoadWidened(F32 d, const uint16_t* p) {
  const hn::RebindToUnsigned<F32> bits;
  const hn::Rebind<uint16_t, F32> narrow;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(bits, hn::LoadU(narrow, p))));
}

// Columns [0, columns) of `length` rows, `stride` apart, as panels of `width` columns: what
// gemm_blis.cc packs of w's transpose, whose registers need no transposing here.
template <typename T>
void PackColumns(const T* from, int64_t stride, int64_t columns, int64_t width, int64_t length,
                 float* to) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  // Neighbouring panels are written together, so that a row is read more than a cache line at a
  // time.
  constexpr int64_t kPanels = 4;
  for (int64_t first = 0; first < columns; first += kPanels * width) {
    const int64_t last = std::min(first + kPanels * width, columns);
    for (int64_t k = 0; k < length; ++k) {
      const T* row = from + k * stride;
      for (int64_t c = first; c < last; c += width) {
        float* at = to + c * length + k * width;
        const int64_t count = std::min(width, last - c);
        int64_t i = 0;
        for (; i + lanes <= count; i += lanes) {
          hn::StoreU(LoadWidened(d, row + c + i), d, at + i);
        }
        for (; i < count; ++i) at[i] = Widened(row[c + i]);
        for (; i < width; ++i) at[i] = 0.0f;
      }
    }
  }
}

void PackTransposed(WeightMatrix w, int64_t begin, int64_t end, int64_t width, int64_t k,
                    int64_t length, float* to) {
  const int64_t offset = k * w.stride + begin;
  if (w.type == ElementType::kF32) {
    PackColumns(static_cast<const float*>(w.data) + offset, w.stride, end - begin, width, length,
                to);
  } else {
    PackColumns(static_cast<const uint16_t*>(w.data) + offset, w.stride, end - begin, width, length,
                to);
  }
}

// ---- few rows: bound by the bandwidth of the weights, which are read as they lie ----

#if HWY_NATIVE_FMA && HWY_TARGET != HWY_SCALAR

// Registers that accumulate: AVX-512 has 32 in all, AVX2 16. So many of them stand side by side.
constexpr int64_t kMostSums = HWY_MAX_BYTES == 64 ? 24 : 12;
constexpr int64_t kVecs = HWY_MAX_BYTES == 64 ? 4 : 2, kWideVecs = 2 * kVecs;

// Up to so many rows of dx take the wide tile: weights arrive faster in longer pieces, but its
// passes of few rows read them more often. GFLOP/s wide and narrow, 3072 x 768 out of cache, one
// thread of a Sapphire Rapids VM under load: 8 rows in fp32 30 and 37, in bf16 50 and 35; 32 rows
// in bf16 71 and 92.
template <typename T>
constexpr int64_t kWideRows = sizeof(T) == 4 ? kMostSums / kWideVecs : 16;

// Weights so many rows ahead are asked for: they lie too far apart for the hardware to guess.
constexpr int64_t kAhead = 32;

// dx (+)= dy w over one block of n for kRows rows and kWidth registers of columns: each output has
// the one chain over n that BLIS gives it.
template <int64_t kRows, int64_t kWidth, typename T>
void AddTile(const float* dy, int64_t dy_stride, const T* w, int64_t w_stride, int64_t length,
             bool add, float* dx, int64_t dx_stride) {
  const F32 d;
  Vec sum[kRows][kWidth];
#pragma GCC unroll 24
  for (int64_t i = 0; i < kRows * kWidth; ++i) sum[i / kWidth][i % kWidth] = hn::Zero(d);
  for (int64_t n = 0; n < length; ++n, w += w_stride) {
#pragma GCC unroll 8
    for (size_t line = 0; line < kWidth * kLanes * sizeof(T) / 64; ++line) {
      __builtin_prefetch(w + kAhead * w_stride + line * (64 / sizeof(T)));
    }
    Vec weights[kWidth];
#pragma GCC unroll 24
    for (int64_t v = 0; v < kWidth; ++v) weights[v] = LoadWidened(d, w + v * kLanes);
#pragma GCC unroll 24
    for (int64_t m = 0; m < kRows; ++m) {
      const Vec gradient = hn::Set(d, dy[m * dy_stride + n]);
#pragma GCC unroll 24
      for (int64_t v = 0; v < kWidth; ++v) {
        sum[m][v] = hn::MulAdd(gradient, weights[v], sum[m][v]);
      }
    }
  }
#pragma GCC unroll 24
  for (int64_t m = 0; m < kRows; ++m) {
#pragma GCC unroll 24
    for (int64_t v = 0; v < kWidth; ++v) {
      float* at = dx + m * dx_stride + v * kLanes;
      hn::StoreU(add ? hn::Add(hn::LoadU(d, at), sum[m][v]) : sum[m][v], d, at);
    }
  }
}

template <int64_t kRows, int64_t kWidth, typename T>
void Tile(ConstMatrix dy, const T* w, int64_t w_stride, bool add, Matrix dx) {
  if constexpr (kRows > 0) {
    if (dy.rows == kRows) {
      return AddTile<kRows, kWidth>(dy.data, dy.stride, w, w_stride, dy.cols, add, dx.data,
                                    dx.stride);
    }
    Tile<kRows - 1, kWidth>(dy, w, w_stride, add, dx);
  }
}

// As many columns as fill kWidth registers, for rows in as few passes as the registers allow.
template <int64_t kWidth, typename T>
void Passes(ConstMatrix dy, const T* w, int64_t w_stride, bool add, Matrix dx) {
  constexpr int64_t kMostRows = kMostSums / kWidth;
  const int64_t passes = (dy.rows + kMostRows - 1) / kMostRows;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t m = dy.rows * pass / passes, rows = dy.rows * (pass + 1) / passes - m;
    Tile<kMostRows, kWidth>({dy.data + m * dy.stride, rows, dy.cols, dy.stride}, w, w_stride, add,
                            {dx.data + m * dx.stride, rows, dx.cols, dx.stride});
  }
}

template <typename T>
void ScalarColumn(ConstMatrix dy, const T* w, int64_t w_stride, bool add, Matrix dx) {
  for (int64_t m = 0; m < dy.rows; ++m) {
    float sum = 0;
    for (int64_t n = 0; n < dy.cols; ++n) {
      sum = std::fma(dy.data[m * dy.stride + n], Widened(w[n * w_stride]), sum);
    }
    float* at = dx.data + m * dx.stride;
    *at = add ? *at + sum : sum;
  }
}

template <typename T>
void FewRowsOf(ConstMatrix dy, const T* w, int64_t w_stride, BlockLengths block, bool accumulate,
               Matrix dx) {
  for (int64_t n = 0, length; n < dy.cols; n += length, accumulate = true) {
    length = block.At(n, dy.cols);
    const ConstMatrix part{dy.data + n, dy.rows, length, dy.stride};
    const T* rows = w + n * w_stride;
    const auto at = [&](int64_t k) { return Matrix{dx.data + k, dx.rows, 0, dx.stride}; };
    int64_t k = 0;
    if (dy.rows <= kWideRows<T>) {
      for (; k + kWideVecs * kLanes <= dx.cols; k += kWideVecs * kLanes) {
        Passes<kWideVecs>(part, rows + k, w_stride, accumulate, at(k));
      }
    }
    for (; k + kVecs * kLanes <= dx.cols; k += kVecs * kLanes) {
      Passes<kVecs>(part, rows + k, w_stride, accumulate, at(k));
    }
    for (; k + kLanes <= dx.cols; k += kLanes) {
      Passes<1>(part, rows + k, w_stride, accumulate, at(k));
    }
    for (; k < dx.cols; ++k) ScalarColumn(part, rows + k, w_stride, accumulate, at(k));
  }
}

bool FewRows(ConstMatrix dy, WeightMatrix w, BlockLengths block, bool accumulate, Matrix dx) {
  if (w.type == ElementType::kF32) {
    FewRowsOf(dy, static_cast<const float*>(w.data), w.stride, block, accumulate, dx);
  } else {
    FewRowsOf(dy, static_cast<const uint16_t*>(w.data), w.stride, block, accumulate, dx);
  }
  return true;
}

#else

// Without a fused multiply-add the order of BLIS cannot be followed.
bool FewRows(ConstMatrix, WeightMatrix, BlockLengths, bool, Matrix) { return false; }

#endif

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(PackTransposed);
HWY_EXPORT(FewRows);

// Few rows are split by columns: whole registers, and a few cache lines of each weight row.
constexpr int64_t kFewestSplitColumns = 128;

// Columns [begin, end) of w.
WeightMatrix Columns(WeightMatrix w, int64_t begin, int64_t end) {
  const int64_t size = w.type == ElementType::kF32 ? sizeof(float) : sizeof(uint16_t);
  return {static_cast<const char*>(w.data) + begin * size, w.type, w.rows, end - begin, w.stride};
}

}  // namespace

bool PackedTransposed(ConstMatrix dy, WeightMatrix w, bool accumulate, Matrix dx) {
  return PackedGemm(
      dy,
      [w](int64_t begin, int64_t end, int64_t width, int64_t k, int64_t length, float* to) {
        HWY_DYNAMIC_DISPATCH(PackTransposed)(w, begin, end, width, k, length, to);
      },
      accumulate, dx);
}

void BlisTransposed(ConstMatrix dy, WeightMatrix w, bool accumulate, Matrix dx) {
  const float beta = accumulate ? 1.0f : 0.0f;
  if (w.type == ElementType::kF32) {
    return BlisGemmTransposed(dy, {static_cast<const float*>(w.data), w.rows, w.cols, w.stride},
                              beta, dx);
  }
  constexpr int64_t kWidenedColumns = 192;  // whole micro-tiles
  thread_local std::vector<float> widened;
  for (int64_t k = 0; k < w.cols; k += kWidenedColumns) {
    const int64_t columns = std::min(kWidenedColumns, w.cols - k);
    const WeightMatrix range = Columns(w, k, k + columns);
    widened.resize(std::max<int64_t>(widened.size(), w.rows * columns));
    for (int64_t n = 0; n < w.rows; ++n) WidenRow(range, n, widened.data() + n * columns);
    BlisGemmTransposed(dy, {widened.data(), w.rows, columns, columns}, beta,
                       {dx.data + k, dx.rows, columns, dx.stride});
  }
}

bool FewRowsTransposed(ConstMatrix dy, WeightMatrix w, bool accumulate, Matrix dx) {
  return HWY_DYNAMIC_DISPATCH(FewRows)(dy, w, BlisBlockLengths(), accumulate, dx);
}

void LinearTransposed(ThreadPool& pool, ConstMatrix dy, WeightMatrix w, bool accumulate,
                      Matrix dx) {
  MS_CHECK(dy.cols == w.rows && dx.rows == dy.rows && dx.cols == w.cols);
  MS_CHECK(dy.stride >= dy.cols && w.stride >= w.cols && dx.stride >= dx.cols);
  if (dx.rows <= kFewRowsLimit && dy.cols > 0 && LeaveFewRowsToOurKernel()) {
    const bool alone = dx.rows * dx.cols * dy.cols < kGemmWorthSplitting;
    pool.Split(dx.cols, alone ? std::max<int64_t>(1, dx.cols) : kFewestSplitColumns,
               [&](int64_t begin, int64_t end) {
                 MS_CHECK(FewRowsTransposed(dy, Columns(w, begin, end), accumulate,
                                            {dx.data + begin, dx.rows, end - begin, dx.stride}));
               });
    return;
  }
  const bool packed = LeaveLoopsToUs();
  ForTiles(pool, dx.rows, dx.cols, dy.cols,
           [&](int64_t m, int64_t m_end, int64_t k, int64_t k_end) {
             const Matrix tile{dx.data + m * dx.stride + k, m_end - m, k_end - k, dx.stride};
             const ConstMatrix rows{dy.data + m * dy.stride, m_end - m, dy.cols, dy.stride};
             const WeightMatrix columns = Columns(w, k, k_end);
             if (!packed || !PackedTransposed(rows, columns, accumulate, tile)) {
               BlisTransposed(rows, columns, accumulate, tile);
             }
           });
}

}  // namespace mambascope::kernels
#endif
