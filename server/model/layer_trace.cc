#include "server/model/layer_trace.h"

#include <algorithm>
#include <cmath>

namespace mambascope::model {
namespace {

// Enough to notice a map that was built from other numbers than the scan's; less than the
// selective numbers at usual sizes.
constexpr int64_t kCheckedChannels = 32;

int64_t CheckedChannels(const ModelConfig& config) {
  return std::min<int64_t>(kCheckedChannels, config.d_inner);
}

constexpr int64_t kAllStreamsBytes = int64_t{64} << 20;

// How many streams are recorded.
int64_t Streams(const ModelConfig& config, int32_t stride) {
  return stride == 0 ? 0 : (config.layers + stride - 1) / stride + 1;
}

}  // namespace

SequenceTrace::SequenceTrace(const ModelConfig& config, int64_t capacity, int32_t stream_stride)
    : capacity(capacity), directions(config.directions()), stream_stride(stream_stride) {
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
  streams.resize(Streams(config, stream_stride));
  for (Array<float>& stream : streams) stream = Array<float>(capacity * config.d_model);
}

int64_t SequenceTrace::Bytes(const ModelConfig& config, int64_t tokens, int32_t stream_stride) {
  const int64_t of_scan = config.selective_width() + 2 * CheckedChannels(config);
  const int64_t a_token = int64_t{config.layers} * config.directions() * of_scan +
                          Streams(config, stream_stride) * config.d_model;
  return tokens * a_token * static_cast<int64_t>(sizeof(float));
}

SequenceTrace SequenceTrace::StreamsOnly(const ModelConfig& config, int64_t capacity,
                                         int32_t stream_stride) {
  SequenceTrace trace(config, 0, stream_stride);
  trace.records_scans = false;
  trace.capacity = capacity;
  for (Array<float>& stream : trace.streams) stream = Array<float>(capacity * config.d_model);
  return trace;
}

int64_t SequenceTrace::StreamsOnlyBytes(const ModelConfig& config, int64_t tokens,
                                        int32_t stream_stride) {
  return Bytes(config, tokens, stream_stride) - Bytes(config, tokens);
}

int32_t SequenceTrace::StreamStride(const ModelConfig& config, int64_t tokens) {
  const int64_t all = tokens * Streams(config, 1) * config.d_model * sizeof(float);
  if (all <= kAllStreamsBytes) return 1;
  return static_cast<int32_t>(std::ceil(std::sqrt(config.layers)));
}

float* SequenceTrace::stream(int32_t l) {
  if (stream_stride == 0) return nullptr;
  const auto count = static_cast<int32_t>(layers.size() / directions);
  if (l == count) return streams.back().data();
  return l % stream_stride == 0 ? streams[l / stream_stride].data() : nullptr;
}

}  // namespace mambascope::model
