#pragma once

#include <cstdint>
#include <cstring>

// A body that the host and the device share: the device kernels are made of it, and so is the plain
// CPU reference (tests/support/scalar_kernels.h), which the tests hold against the Highway kernels.
// So the arithmetic that a GPU runs is tested where there is none.
//
// Contraction is off on both sides and every fused multiply-add is named, so a body gives the same
// bits on both; the one exception is DecayPower (math_body.h).
#ifdef __CUDACC__
#define MS_HOST_DEVICE __host__ __device__
#else
#define MS_HOST_DEVICE
#endif

namespace mambascope::kernels {

template <typename To, typename From>
MS_HOST_DEVICE inline To BitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace mambascope::kernels
