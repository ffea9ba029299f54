#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>

#include "server/base/thread_pool.h"

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

// The same on the pool's threads, where that pays.
inline bool AllFinite(ThreadPool& pool, const float* values, int64_t count) {
  constexpr int64_t kFewNumbers = 1 << 16;  // waking the pool costs more than looking at them
  if (count <= kFewNumbers) return AllFinite(values, count);
  std::atomic<bool> finite = true;
  pool.Split(count, 16, [&](int64_t begin, int64_t end) {
    if (!AllFinite(values + begin, end - begin)) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load(std::memory_order_relaxed);
}

// The same of 16-bit numbers whose exponent bits are `exponent`.
inline bool AllFinite16(const uint16_t* bits, int64_t count, uint16_t exponent) {
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    uint16_t found = 0;
    for (int64_t i = begin; i < end; ++i) found |= (bits[i] & exponent) == exponent ? 1 : 0;
    if (found != 0) return false;
  }
  return true;
}

}  // namespace mambascope::model
