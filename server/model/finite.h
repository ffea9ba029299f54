#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace mambascope::model {

// Whether all values are finite. Looks at the bits, because a test of each float as a number
// neither vectorises nor survives -ffast-math; stops within a block of the first that is not.
inline bool AllFinite(const float* values, int64_t count) {
  constexpr int64_t kBlock = 4096;
  constexpr uint32_t kExponent = 0x7f800000;  // all ones: infinity or not a number
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    uint32_t found = 0;
    for (int64_t i = begin; i < end; ++i) {
      found |= (std::bit_cast<uint32_t>(values[i]) & kExponent) == kExponent ? 1u : 0u;
    }
    if (found != 0) return false;
  }
  return true;
}

}  // namespace mambascope::model
