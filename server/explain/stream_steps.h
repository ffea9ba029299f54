#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace mambascope::explain {

// How many calls of StreamWalk::Prepare compute something before each of `layers`, visited in this
// order, is at hand, if the trace keeps every `stream_stride`-th stream: each is a slice of its
// own. What leaves the last layer is always kept and does not belong here.
inline std::vector<int32_t> StreamSteps(std::span<const int32_t> layers, int32_t stream_stride) {
  std::vector<int32_t> steps;
  int32_t first = 0, reached = 0;  // the recorded stream that is walked from, and how far
  for (const int32_t layer : layers) {
    const int32_t recorded = layer / stream_stride * stream_stride;
    if (layer != recorded && recorded != first) reached = first = recorded;
    steps.push_back(layer == recorded ? 0 : std::max(0, layer - reached));
    if (layer != recorded) reached = std::max(reached, layer);
  }
  return steps;
}

// All of them.
inline int32_t RecomputedLayers(std::span<const int32_t> layers, int32_t stream_stride) {
  const std::vector<int32_t> steps = StreamSteps(layers, stream_stride);
  return std::accumulate(steps.begin(), steps.end(), 0);
}

}  // namespace mambascope::explain
