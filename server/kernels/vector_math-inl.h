// Elementwise functions on one Highway vector, compiled once for each target (so no #pragma once).
// Each lane's result depends on that lane alone. Errors are against the exact function, measured
// over the whole range (tests/kernels/selective_scan_test.cc); NaN stays NaN, nothing else becomes
// one.
#if defined(MAMBASCOPE_KERNELS_VECTOR_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MAMBASCOPE_KERNELS_VECTOR_MATH_INL_H_
#undef MAMBASCOPE_KERNELS_VECTOR_MATH_INL_H_
#else
#define MAMBASCOPE_KERNELS_VECTOR_MATH_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using Vec = hn::Vec<F32>;

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
// AVX-512 splits v into whole and fraction in one operation and scales by a whole power in another.

// v - floor(v), in [0, 1].
HWY_INLINE Vec Fraction(F32, Vec v) { return Vec{_mm512_reduce_ps(v.raw, /*down=*/1)}; }

// 2^(floor(v) + f) for f in [0, 1] and little beyond, rounded to zero when too small.
HWY_INLINE Vec Exp2OfParts(F32 d, Vec f, Vec v) {
  // 2^f = 1 + f q(f), minimax in relative error (8.2e-8) under the condition that 2^0 is 1.
  Vec p = hn::Set(d, 0.00186695263f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.00901748054f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.0557995141f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.240164593f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.693151295f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  return Vec{_mm512_scalef_ps(p.raw, v.raw)};
}

// 2^v for v <= 0 in seven operations, relative error <= 2e-7 where it is a normal number.
// exp(x a) = 2^(x (a log2(e))): callers fold the constant into a factor that they reuse.
HWY_INLINE Vec Exp2NonPositive(F32 d, Vec v) { return Exp2OfParts(d, Fraction(d, v), v); }

// exp(v), relative error <= 3e-7 for v in [-87.3, 0]; below, the value there.
HWY_INLINE Vec ExpNonPositive(F32 d, Vec v) {
  v = hn::Max(hn::Set(d, -87.3f), v);  // in this order x86 hands a NaN in v on
  const Vec log2_e = hn::Set(d, 1.44269504f);
  const Vec w = hn::Mul(v, log2_e);
  // What rounding took from v log2(e), the constant's own rounding included.
  const Vec rest = hn::MulAdd(v, hn::Set(d, 1.92596303e-8f), hn::MulSub(v, log2_e, w));
  return Exp2OfParts(d, hn::Add(Fraction(d, w), rest), w);
}
#else
// 1.5 * 2^23: adding it to |v| < 2^22 rounds v to an integer, left in the low bits of the sum.
constexpr float kRoundingShift = 12582912.0f;

// 2^(n + f) for |f| <= 1/2, where `shifted` = n + kRoundingShift and n in [-126, 127].
HWY_INLINE Vec Exp2OfParts(F32 d, Vec f, Vec shifted) {
  // 2^f = 1 + f q(f), minimax in relative error (9.1e-8) under the condition that 2^0 is 1.
  Vec p = hn::Set(d, 0.0013264727f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.009671513f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.055507336f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.24022242f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.693147f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const hn::RebindToSigned<F32> di;  // n into the exponent; the shift drops kRoundingShift's bits
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

// 2^v for v <= 0 in eleven operations, relative error <= 2e-7. Below -126 the result stays at the
// smallest normal number, 1.2e-38, which every sum it enters rounds away.
// exp(x a) = 2^(x (a log2(e))): callers fold the constant into a factor that they reuse.
HWY_INLINE Vec Exp2NonPositive(F32 d, Vec v) {
  v = hn::Max(hn::Set(d, -126.0f), v);  // in this order x86 hands a NaN in v on
  const Vec shift = hn::Set(d, kRoundingShift);
  const Vec shifted = hn::Add(v, shift);
  return Exp2OfParts(d, hn::Sub(v, hn::Sub(shifted, shift)), shifted);
}

// exp(v), relative error <= 3e-7 for v in [-87.3, 0]; below, the value there.
HWY_INLINE Vec ExpNonPositive(F32 d, Vec v) {
  v = hn::Max(hn::Set(d, -87.3f), v);
  const Vec log2_e = hn::Set(d, 1.44269504f);
  const Vec shift = hn::Set(d, kRoundingShift);
  const Vec shifted = hn::Add(hn::Mul(v, log2_e), shift);
  const Vec n = hn::Sub(shifted, shift);
  // v - n ln 2 with ln 2 in two parts: n times the first, of 15 bits, is exact.
  Vec r = hn::NegMulAdd(n, hn::Set(d, 0.693145751953125f), v);
  r = hn::NegMulAdd(n, hn::Set(d, 1.428606765330187e-06f), r);
  return Exp2OfParts(d, hn::Mul(r, log2_e), shifted);
}
#endif

// log(1 + e^v) = max(v, 0) + log1p(e^-|v|), relative error <= 4e-7 for v >= -87, so small steps
// keep their digits. With s = e/(2 + e), log1p(e) = 2 atanh(s), s in [0, 1/3].
HWY_INLINE Vec Softplus(F32 d, Vec v) {
  const Vec e = ExpNonPositive(d, hn::Neg(hn::Abs(v)));
  const Vec s = hn::Div(e, hn::Add(e, hn::Set(d, 2.0f)));
  const Vec t = hn::Mul(s, s);
  // atanh(s) = s (1 + t p(t)), minimax in relative error (4.5e-9).
  Vec p = hn::Set(d, 0.14005993f);
  p = hn::MulAdd(p, t, hn::Set(d, 0.14000903f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.20010763f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.3333321f));
  const Vec twice = hn::Add(s, s);
  return hn::Add(hn::Max(hn::Zero(d), v), hn::MulAdd(hn::Mul(twice, t), p, twice));
}

// 1 / (1 + e^-v) through e^-|v|, so that neither end overflows; relative error <= 5e-7.
HWY_INLINE Vec Sigmoid(F32 d, Vec v) {
  const Vec e = ExpNonPositive(d, hn::Neg(hn::Abs(v)));
  const Vec one = hn::Set(d, 1.0f);
  return hn::Div(hn::IfThenElse(hn::Lt(v, hn::Zero(d)), e, one), hn::Add(one, e));
}

HWY_INLINE Vec Silu(F32 d, Vec v) { return hn::Mul(v, Sigmoid(d, v)); }

// The derivative of v sigmoid(v), given the latter.
HWY_INLINE Vec SiluSlope(F32 d, Vec v, Vec sigmoid) {
  const Vec one = hn::Set(d, 1.0f);
  return hn::Mul(sigmoid, hn::MulAdd(v, hn::Sub(one, sigmoid), one));
}

// The first `count` lanes at p, the others zero; nothing beyond them is read.
HWY_INLINE Vec LoadPart(F32 d, const float* p, size_t count) {
#if HWY_MEM_OPS_MIGHT_FAULT
  HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)] = {};
  for (size_t i = 0; i < count; ++i) lanes[i] = p[i];
  return hn::Load(d, lanes);
#else
  return hn::MaskedLoad(hn::FirstN(d, count), d, p);
#endif
}

// Writes the first `count` lanes and touches nothing beyond them: it may be another thread's.
HWY_INLINE void StorePart(Vec v, F32 d, float* p, size_t count) {
#if HWY_MEM_OPS_MIGHT_FAULT
  HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(v, d, lanes);
  for (size_t i = 0; i < count; ++i) p[i] = lanes[i];
#else
  hn::BlendedStore(v, hn::FirstN(d, count), d, p);
#endif
}

// One register of numbers, `count` of its lanes in use. Whether all are is a template argument, so
// that only a tail pays for partial loads.
template <bool kAllLanes>
struct Lane {
  const F32 d;
  const size_t count;
  HWY_INLINE Vec Load(const float* p) const {
    return kAllLanes ? hn::LoadU(d, p) : LoadPart(d, p, count);
  }
  HWY_INLINE void Store(Vec v, float* p) const {
    kAllLanes ? hn::StoreU(v, d, p) : StorePart(v, d, p, count);
  }
};

// Calls body(i, lane) for each register of `count` numbers, the i-th number the lane's first.
template <typename Body>
HWY_INLINE void ForEachRegister(int64_t count, Body body) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(i, Lane<true>{d, static_cast<size_t>(lanes)});
  if (i < count) body(i, Lane<false>{d, static_cast<size_t>(count - i)});
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
