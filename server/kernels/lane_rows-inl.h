// Rows of floats whose last register may be a part of one, and sums over the lanes of many
// registers at once. Compiled once for each target (so no #pragma once).
#if defined(MAMBASCOPE_KERNELS_LANE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MAMBASCOPE_KERNELS_LANE_ROWS_INL_H_
#undef MAMBASCOPE_KERNELS_LANE_ROWS_INL_H_
#else
#define MAMBASCOPE_KERNELS_LANE_ROWS_INL_H_
#endif

#include <cstdint>

#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

// One register of a row of which `count` >= 1 elements are left; missing lanes are zero.
HWY_INLINE Vec LoadLanes(F32 d, const float* p, int64_t count) {
  return count >= static_cast<int64_t>(hn::Lanes(d)) ? hn::LoadU(d, p) : LoadPart(d, p, count);
}

HWY_INLINE void StoreLanes(Vec v, F32 d, float* p, int64_t count) {
  count >= static_cast<int64_t>(hn::Lanes(d)) ? hn::StoreU(v, d, p) : StorePart(v, d, p, count);
}

// Lane k of the result: the sum over the lanes of register k at `rows`, one register behind the
// other. Neighbouring lanes are added in every round, so a sum's order is a tree of its own lanes.
HWY_INLINE Vec SumsOfRegisters(F32 d, const float* rows) {
  constexpr size_t kMaxLanes = hn::MaxLanes(F32());
  const size_t lanes = hn::Lanes(d);
  Vec sums[kMaxLanes];
  for (size_t k = 0; k < kMaxLanes; ++k) {
    if (k < lanes) sums[k] = hn::Load(d, rows + k * lanes);
  }
  for (size_t left = kMaxLanes / 2; left > 0; left /= 2) {
    for (size_t k = 0; k < left && k < lanes; ++k) {
#if HWY_TARGET != HWY_SCALAR  // which has one lane and comes here never
      const Vec a = sums[2 * k], b = sums[2 * k + 1];
      sums[k] = hn::Add(hn::ConcatEven(d, b, a), hn::ConcatOdd(d, b, a));
#endif
    }
  }
  return sums[0];
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
