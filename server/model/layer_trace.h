#pragma once

#include <cstdint>
#include <vector>

#include "server/base/array.h"
#include "server/model/config.h"

namespace mambascope::model {

// What a forward pass leaves behind for explanations, per token and layer: dt_rank + 2 d_state
// numbers (delta, B and C follow from them, bit for bit, by MambaModel::ScanParametersOf), and x
// and y of a few channels, by which an explanation proves that it rebuilds what was computed.
// Linear in the length and small: 576 bytes per token and layer at mamba-130m's size.
struct LayerTrace {
  Array<float> x_dbl;      // [tokens, dt_rank + 2 d_state]  x_proj's output: dt, B, C
  Array<float> x_checked;  // [tokens, checked channels]     scan input
  Array<float> y_checked;  // [tokens, checked channels]     scan output plus D x, before the gate
};

struct SequenceTrace {
  // Room for `capacity` tokens of a whole sequence; filled piece by piece, in order.
  SequenceTrace(const ModelConfig& config, int64_t capacity);
  static int64_t Bytes(const ModelConfig& config, int64_t tokens);

  int64_t tokens = 0;  // filled so far, in all layers once a forward pass is over
  std::vector<int32_t> checked_channels;  // ascending, evenly spaced, at most 32
  std::vector<LayerTrace> layers;
};

}  // namespace mambascope::model
