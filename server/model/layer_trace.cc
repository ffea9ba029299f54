#include "server/model/layer_trace.h"

#include <algorithm>

namespace mambascope::model {
namespace {

// Enough to notice a map that was built from other numbers than the scan's; less than the
// selective numbers at usual sizes.
constexpr int64_t kCheckedChannels = 32;

int64_t CheckedChannels(const ModelConfig& config) {
  return std::min<int64_t>(kCheckedChannels, config.d_inner);
}

}  // namespace

SequenceTrace::SequenceTrace(const ModelConfig& config, int64_t capacity)
    : capacity(capacity), directions(config.directions()) {
  const int64_t checked = CheckedChannels(config);
  for (int64_t i = 0; i < checked; ++i) {
    checked_channels.push_back(static_cast<int32_t>(i * config.d_inner / checked));
  }
  layers.resize(int64_t{config.layers} * directions);
  for (LayerTrace& layer : layers) {
    layer.selective = Array<float>(capacity * config.selective_width());
    layer.x_checked = Array<float>(capacity * checked);
    layer.y_checked = Array<float>(capacity * checked);
  }
}

int64_t SequenceTrace::Bytes(const ModelConfig& config, int64_t tokens) {
  return tokens * config.layers * config.directions() *
         (config.selective_width() + 2 * CheckedChannels(config)) *
         static_cast<int64_t>(sizeof(float));
}

}  // namespace mambascope::model
