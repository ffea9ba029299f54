#pragma once

#include <cstdint>

#include "server/kernels/host_device.h"

// The orders in which sums are taken, which the device's threads and the reference's loops share: a
// result depends on the numbers and their count, never on how many threads or rows there are.
namespace mambascope::kernels::body {

// The sum of values[0..count), count a power of two, halves onto halves. Overwrites `values`. On
// the device each step is one exchange between lanes.
MS_HOST_DEVICE inline float TreeSum(float* values, int count) {
  for (int half = count / 2; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

// States of one channel are dealt to kLanes lanes in packets, so that a lane reads its B and C as
// one vector: `per_lane` states a lane (1, 2 or a multiple of 4); the s-th of lane l is
MS_HOST_DEVICE inline int StateOf(int lane, int s, int per_lane, int lanes) {
  const int packet = per_lane < 4 ? per_lane : 4;
  return (s / packet * lanes + lane) * packet + s % packet;
}

constexpr int kLanes = 16;  // lanes that share one channel's states
constexpr int kMaxStates = 256;

// States a lane: the least that covers d_state <= kMaxStates.
inline int StatesPerLane(int64_t d_state) {
  int per_lane = 1;
  while (per_lane * kLanes < d_state) per_lane *= 2;
  return per_lane;
}

// A row's squares are summed by kRowLanes lanes, packet of four after packet of four, in chains of
// fused multiply-adds, then by TreeSum: narrow rows by the first warp's worth, wide ones by eight.
constexpr int kPacket = 4;
MS_HOST_DEVICE inline int RowLanes(int64_t cols) { return cols <= 512 ? 32 : 256; }

}  // namespace mambascope::kernels::body
