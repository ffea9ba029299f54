#pragma once

#include <cstdint>

#include "server/kernels/host_device.h"

// fp32 numbers as sums of bf16 ones, for tensor cores that take nothing longer.
namespace mambascope::kernels::body {

// The nearest bf16, ties to even, as the upper half of an fp32 number; NaN stays one.
MS_HOST_DEVICE inline uint16_t NearestBf16(float v) {
  const uint32_t bits = BitsAs<uint32_t>(v);
  if (v != v) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

MS_HOST_DEVICE inline float WideBf16(uint16_t v) {
  return BitsAs<float>(static_cast<uint32_t>(v) << 16);
}

struct Bf16Parts {
  uint16_t high, middle, low;
};

// high + middle + low = v exactly, as long as `low` is no subnormal number: each subtraction is
// exact, and three times 8 bits are the 24 that v has.
MS_HOST_DEVICE inline Bf16Parts SplitInParts(float v) {
  const uint16_t high = NearestBf16(v);
  const float rest = v - WideBf16(high);
  const uint16_t middle = NearestBf16(rest);
  return {high, middle, NearestBf16(rest - WideBf16(middle))};
}

}  // namespace mambascope::kernels::body
