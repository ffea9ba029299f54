#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/model/config.h"
#include "server/model/layer_trace.h"

namespace mambascope::explain {

// How many calls of StreamWalk::Prepare compute something before each of `layers`, which ascend, is
// at hand, if the trace keeps the streams that are right for `tokens`: each is a slice of its own.
inline std::vector<int32_t> StreamSteps(const model::ModelConfig& config,
                                        std::span<const int32_t> layers, int64_t tokens) {
  const int32_t stride = model::SequenceTrace::StreamStride(config, tokens);
  std::vector<int32_t> steps;
  int32_t reached = 0;
  for (const int32_t layer : layers) {
    const int32_t recorded = layer / stride * stride;
    reached = reached < recorded ? recorded : reached;
    steps.push_back(layer == recorded ? 0 : layer - reached);
    if (layer != recorded) reached = layer;
  }
  return steps;
}

}  // namespace mambascope::explain
