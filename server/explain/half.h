#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace mambascope::explain {

// IEEE binary16 of a float, rounded to nearest, ties to even; beyond the range infinity, NaN stays
// NaN. In integers, so that every machine gives the same bits whatever its rounding mode and
// whether it flushes subnormals.
inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half = 0;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | (magnitude >> 13 & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // 65520, half-way between the largest half and 2^16
    half = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // 2^-14, the smallest normal half
    half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  } else if (magnitude >= 0x33000000) {  // 2^-25, half of the smallest subnormal half
    const uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t shift = 126 - (magnitude >> 23);  // to units of 2^-24: 14 to 24
    half = (significand + (1u << (shift - 1)) - 1 + (significand >> shift & 1)) >> shift;
  }
  return static_cast<uint16_t>(sign | half);
}

inline void AppendHalves(std::span<const float> values, std::string& bytes) {
  const size_t begin = bytes.size();
  bytes.resize(begin + 2 * values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = FloatToHalf(values[i]);
    std::memcpy(bytes.data() + begin + 2 * i, &half, 2);
  }
}

}  // namespace mambascope::explain
