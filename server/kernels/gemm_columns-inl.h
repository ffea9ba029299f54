// Matrices are stored along k, and a lane wants a row: a few numbers of each row are loaded at a
// time and transposed in registers. Compiled once for each target (so no #pragma once). T is what
// is stored: float, or uint16_t for bf16.
#if defined(MAMBASCOPE_KERNELS_GEMM_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MAMBASCOPE_KERNELS_GEMM_COLUMNS_INL_H_
#undef MAMBASCOPE_KERNELS_GEMM_COLUMNS_INL_H_
#else
#define MAMBASCOPE_KERNELS_GEMM_COLUMNS_INL_H_
#endif

#include <bit>
#include <cstdint>

#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

constexpr int64_t kLanes = HWY_MAX_BYTES / sizeof(float);

HWY_INLINE float Widened(float v) { return v; }
HWY_INLINE float Widened(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

template <typename T>
HWY_INLINE Vec LoadColumn(F32 d, const T* w, int64_t stride) {
  HWY_ALIGN float lanes[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) lanes[j] = Widened(w[j * stride]);
  return hn::Load(d, lanes);
}

#if HWY_TARGET != HWY_SCALAR

// Of each weight row, 16 bytes are loaded at a time: one number in each word, or two.
template <typename T>
constexpr int64_t kStep = 16 / sizeof(T);

// Four words from each of the rows j, j + 4, j + 8, ... of w.
template <typename T>
HWY_INLINE Vec LoadEveryFourthRow(F32 d, const T* w, int64_t stride) {
  const hn::Repartition<T, F32> full;
#if HWY_MAX_BYTES == 16
  (void)stride;
  return hn::BitCast(d, hn::LoadU(full, w));
#else
  const hn::Half<decltype(full)> half;
  if constexpr (kLanes == 8) {
    return hn::BitCast(d, hn::Combine(full, hn::LoadU(half, w + 4 * stride), hn::LoadU(half, w)));
  } else {
    const hn::Half<decltype(half)> quarter;
    const auto low = hn::Combine(half, hn::LoadU(quarter, w + 4 * stride), hn::LoadU(quarter, w));
    const auto high =
        hn::Combine(half, hn::LoadU(quarter, w + 12 * stride), hn::LoadU(quarter, w + 8 * stride));
    return hn::BitCast(d, hn::Combine(full, high, low));
  }
#endif
}

// word[i] holds the i-th word of each of the kLanes rows from w, for i in [0, 4).
template <typename T>
HWY_INLINE void LoadWords(F32 d, const T* w, int64_t stride, Vec word[4]) {
  const hn::Repartition<double, F32> pairs;
  const Vec r0 = LoadEveryFourthRow(d, w, stride);
  const Vec r1 = LoadEveryFourthRow(d, w + stride, stride);
  const Vec r2 = LoadEveryFourthRow(d, w + 2 * stride, stride);
  const Vec r3 = LoadEveryFourthRow(d, w + 3 * stride, stride);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, r2, r3));
  word[0] = hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23));
  word[1] = hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23));
  word[2] = hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23));
  word[3] = hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23));
}

// w[lane, c] of the kLanes rows whose words these are, for c in [0, kStep).
template <typename T>
HWY_INLINE Vec Column(F32 d, const Vec word[4], int64_t c) {
  if constexpr (sizeof(T) == 4) {
    (void)d;
    return word[c];
  } else {  // a bf16 is the upper half of its float
    const hn::RebindToUnsigned<F32> bits;
    const auto both = hn::BitCast(bits, word[c / 2]);
    return hn::BitCast(
        d, c % 2 == 0 ? hn::ShiftLeft<16>(both) : hn::And(both, hn::Set(bits, 0xFFFF0000u)));
  }
}

#endif

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
