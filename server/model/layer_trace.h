#pragma once

#include <cstdint>
#include <vector>

#include "server/base/array.h"
#include "server/model/config.h"

namespace mambascope::model {

// What a forward pass leaves behind for explanations, per token and layer: the numbers from which
// delta, B and C follow, bit for bit, by MambaModel::ScanParametersOf, and x and y of a few
// channels, by which an explanation proves that it rebuilds what was computed. Linear in the length
// and small: 576 bytes per token and layer at mamba-130m's size.
struct LayerTrace {
  // [tokens, selective_width]  x_proj's output, dt, B, C (Falcon-Mamba: normalised); Mamba-2: dt
  // before its bias, then B and C of the groups.
  Array<float> selective;
  Array<float> x_checked;  // [tokens, checked channels]  scan input
  Array<float> y_checked;  // [tokens, checked channels]  scan output plus D x, before the gate
};

struct SequenceTrace {
  // Room for `capacity` tokens of a whole sequence; filled piece by piece, in order. With a
  // `stream_stride` s > 0 also the residual stream that enters layers 0, s, 2s, .. and the one that
  // leaves the last layer.
  SequenceTrace(const ModelConfig& config, int64_t capacity, int32_t stream_stride = 0);
  static int64_t Bytes(const ModelConfig& config, int64_t tokens, int32_t stream_stride = 0);
  // Of streams alone: no LayerTrace is filled.
  static SequenceTrace StreamsOnly(const ModelConfig& config, int64_t capacity,
                                   int32_t stream_stride);
  static int64_t StreamsOnlyBytes(const ModelConfig& config, int64_t tokens, int32_t stream_stride);
  // 1 where all layers' streams fit 64 MiB, else about sqrt(layers): what lies between is
  // recomputed (StreamWalk).
  static int32_t StreamStride(const ModelConfig& config, int64_t tokens);

  // `direction` 1 is Vim's backward scan, whose tokens stand in its own order, the last one first.
  LayerTrace& layer(int32_t l, int32_t direction = 0) { return layers[l * directions + direction]; }
  const LayerTrace& layer(int32_t l, int32_t direction = 0) const {
    return layers[l * directions + direction];
  }
  // [capacity, d_model] entering layer l, or leaving the last one for l = layers; null if it was
  // not recorded.
  float* stream(int32_t l);
  const float* stream(int32_t l) const { return const_cast<SequenceTrace*>(this)->stream(l); }

  bool records_scans = true;
  int64_t tokens = 0;  // filled so far, in all layers once a forward pass is over
  int64_t capacity = 0;
  std::vector<int32_t> checked_channels;  // ascending, evenly spaced, at most 32
  int32_t directions = 1;
  std::vector<LayerTrace> layers;  // [layers, directions]
  int32_t stream_stride = 0;
  std::vector<Array<float>> streams;  // entering layers 0, s, 2s, .., and the last one leaving
};

}  // namespace mambascope::model
