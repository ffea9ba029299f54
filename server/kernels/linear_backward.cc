#include "server/kernels/linear_backward.h"

#include <algorithm>
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

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(PackTransposed);

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

void LinearTransposed(ThreadPool& pool, ConstMatrix dy, WeightMatrix w, bool accumulate,
                      Matrix dx) {
  MS_CHECK(dy.cols == w.rows && dx.rows == dy.rows && dx.cols == w.cols);
  MS_CHECK(dy.stride >= dy.cols && w.stride >= w.cols && dx.stride >= dx.cols);
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
