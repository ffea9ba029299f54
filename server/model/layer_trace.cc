#include "server/model/layer_trace.h"

#include <algorithm>

namespace mambascope::model {
namespace {

// Enough to notice a map that was built from other numbers than the scan's; less than x_dbl itself
// at usual sizes.
constexpr int64_t kCheckedChannels = 32;

int64_t CheckedChannels(const ModelConfig& config) {
  return std::min<int64_t>(kCheckedChannels, config.d_inner);
}

int64_t Width(const ModelConfig& config) { return config.dt_rank + 2 * config.d_state; }

}  // namespace

SequenceTrace::SequenceTrace(const ModelConfig& config, int64_t capacity) {
  const int64_t checked = CheckedChannels(config);
  for (int64_t i = 0; i < checked; ++i) {
    checked_channels.push_back(static_cast<int32_t>(i * config.d_inner / checked));
  }
  layers.resize(config.layers);
  for (LayerTrace& layer : layers) {
    layer.x_dbl = Array<float>(capacity * Width(config));
    layer.x_checked = Array<float>(capacity * checked);
    layer.y_checked = Array<float>(capacity * checked);
  }
}

int64_t SequenceTrace::Bytes(const ModelConfig& config, int64_t tokens) {
  return tokens * config.layers * (Width(config) + 2 * CheckedChannels(config)) *
         static_cast<int64_t>(sizeof(float));
}

}  // namespace mambascope::model
