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

constexpr int kLanes = hn::MaxLanes(F32());

// One register of a row of which `count` >= 1 elements are left; missing lanes are zero.
HWY_INLINE Vec LoadLanes(F32 d, const float* p, int64_t count) {
  return count >= static_cast<int64_t>(hn::Lanes(d)) ? hn::LoadU(d, p) : LoadPart(d, p, count);
}

HWY_INLINE void StoreLanes(Vec v, F32 d, float* p, int64_t count) {
  count >= static_cast<int64_t>(hn::Lanes(d)) ? hn::StoreU(v, d, p) : StorePart(v, d, p, count);
}

// The lanes of `low` and then of `high` with an even number, and with an odd one.
#if HWY_TARGET == HWY_SCALAR  // has one lane and no such functions; never called
HWY_INLINE Vec EvenLanes(Vec high, Vec) { return high; }
HWY_INLINE Vec OddLanes(Vec high, Vec) { return high; }
#else
HWY_INLINE Vec EvenLanes(Vec high, Vec low) { return hn::ConcatEven(F32(), high, low); }
HWY_INLINE Vec OddLanes(Vec high, Vec low) { return hn::ConcatOdd(F32(), high, low); }
#endif

// In place: lane c of vector r <-> lane r of vector c. Each step moves the lowest bit of the
// vector's number to the top of the lane's and the lowest bit of the lane's to the top of the
// vector's.
HWY_INLINE void Transpose(Vec (&v)[kLanes]) {
  for (int step = 1; step < kLanes; step *= 2) {
    Vec u[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      u[i] = EvenLanes(v[2 * i + 1], v[2 * i]);
      u[i + kLanes / 2] = OddLanes(v[2 * i + 1], v[2 * i]);
    }
    for (int i = 0; i < kLanes; ++i) v[i] = u[i];
  }
}

// Lane k of the result: the sum over the lanes of register k at `rows`, one register behind the
// other. Neighbouring lanes are added in every round, so a sum's order is a tree of its own lanes.
HWY_INLINE Vec SumsOfRegisters(F32 d, const float* rows) {
  Vec sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = hn::Load(d, rows + i * kLanes);
  for (int left = kLanes / 2; left > 0; left /= 2) {
    for (int i = 0; i < left; ++i) {
      const Vec low = sums[2 * i], high = sums[2 * i + 1];
      sums[i] = hn::Add(EvenLanes(high, low), OddLanes(high, low));
    }
  }
  return sums[0];
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
