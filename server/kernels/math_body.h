#pragma once

#include <cmath>
#include <cstdint>

#include "server/kernels/activation.h"
#include "server/kernels/host_device.h"

// Elementwise functions, the formulas and constants of vector_math-inl.h once more: on AVX2, which
// takes the same, the results are the same bits. NaN stays NaN.
namespace mambascope::kernels::body {

constexpr float kLog2E = 1.44269504f;
constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// 2^(n + f) for |f| <= 1/2, where `shifted` = n + kRoundingShift and n in [-126, 127].
MS_HOST_DEVICE inline float Exp2OfParts(float f, float shifted) {
  float p = 0.0013264727f;
  p = fmaf(p, f, 0.009671513f);
  p = fmaf(p, f, 0.055507336f);
  p = fmaf(p, f, 0.24022242f);
  p = fmaf(p, f, 0.693147f);
  p = fmaf(p, f, 1.0f);
  // A device's NaN has all bits set, so the sum would be a number.
  if (p != p) return p;
  return BitsAs<float>(BitsAs<uint32_t>(p) + (BitsAs<uint32_t>(shifted) << 23));
}

// 2^v for v <= 0, relative error <= 2e-7; below -126 the smallest normal number.
MS_HOST_DEVICE inline float Exp2NonPositive(float v) {
  v = v < -126.0f ? -126.0f : v;
  const float shifted = v + kRoundingShift;
  return Exp2OfParts(v - (shifted - kRoundingShift), shifted);
}

// 2^v for v <= 0: a state's decay, by far the most frequent function of all. On the device one
// instruction with a relative error <= 2^-22 that flushes to zero below 2^-126, where the
// polynomial would cost twelve (four times the rest of a state's step). MAMBASCOPE_CUDA_SAME_BITS
// takes the polynomial there too, for tests that compare bits.
MS_HOST_DEVICE inline float DecayPower(float v) {
#if defined(__CUDA_ARCH__) && !defined(MAMBASCOPE_CUDA_SAME_BITS)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
#else
  return Exp2NonPositive(v);
#endif
}

// e^v, relative error <= 3e-7 for v in [-87.3, 0]; below, the value there.
MS_HOST_DEVICE inline float ExpNonPositive(float v) {
  v = v < -87.3f ? -87.3f : v;
  const float shifted = v * kLog2E + kRoundingShift;
  const float n = shifted - kRoundingShift;
  float r = fmaf(-n, 0.693145751953125f, v);  // v - n ln 2, ln 2 in two parts
  r = fmaf(-n, 1.428606765330187e-06f, r);
  return Exp2OfParts(r * kLog2E, shifted);
}

// log(1 + e^v), relative error <= 4e-7 for v >= -87.
MS_HOST_DEVICE inline float Softplus(float v) {
  const float e = ExpNonPositive(-fabsf(v));
  const float s = e / (e + 2.0f);
  const float t = s * s;
  float p = 0.14005993f;
  p = fmaf(p, t, 0.14000903f);
  p = fmaf(p, t, 0.20010763f);
  p = fmaf(p, t, 0.3333321f);
  const float twice = s + s;
  return (v < 0.0f ? 0.0f : v) + fmaf(twice * t, p, twice);
}

// 1 / (1 + e^-v), relative error <= 5e-7.
MS_HOST_DEVICE inline float Sigmoid(float v) {
  const float e = ExpNonPositive(-fabsf(v));
  return (v < 0.0f ? e : 1.0f) / (1.0f + e);
}

MS_HOST_DEVICE inline float Silu(float v) { return v * Sigmoid(v); }

MS_HOST_DEVICE inline float Activate(Activation activation, float c) {
  switch (activation) {
    case Activation::kSilu:
      return Silu(c);
    case Activation::kRelu:
      return c < 0.0f ? 0.0f : c;
    case Activation::kIdentity:
      break;
  }
  return c;
}

}  // namespace mambascope::kernels::body
