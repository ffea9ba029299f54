#pragma once

#include <cstdint>

#include "server/base/array.h"
#include "server/model/config.h"

namespace mambascope::model {

// Everything a sequence carries from one token to the next, of all layers; fp32 always, because
// rounding the state drifts on long inputs. Starts as zeros, "before the first token". Move only;
// costly copies have a name.
class RecurrentState {
 public:
  explicit RecurrentState(const ModelConfig& config);

  RecurrentState Copy() const;
  float* conv_state(
      int32_t layer);  // [d_conv - 1, d_inner] the last convolution inputs, oldest first
  float* ssm_state(int32_t layer);  // [d_state, d_inner]
  static int64_t Bytes(const ModelConfig& config);

 private:
  RecurrentState() = default;

  int64_t conv_size_ = 0, ssm_size_ = 0;  // elements per layer
  Array<float> values_;                   // per layer: conv_state, then ssm_state
};

}  // namespace mambascope::model
