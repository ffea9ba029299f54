#pragma once

#include <cstdint>
#include <span>

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
  // [d_conv - 1, conv_channels] the last convolution inputs, oldest first. `direction` 1 is Vim's
  // backward scan.
  float* conv_state(int32_t layer, int32_t direction = 0);
  // [d_state, d_inner]; Mamba-2: [heads, d_state, head_dim]
  float* ssm_state(int32_t layer, int32_t direction = 0);
  // Of models that pool the mean: the sum of the normalised outputs so far, [d_model], and of how
  // many; double, added token by token, so that a cut changes no bit. Empty otherwise.
  std::span<double> pooled() { return pooled_; }
  int64_t pooled_tokens = 0;

  static int64_t Bytes(const ModelConfig& config);

 private:
  RecurrentState() = default;

  int32_t directions_ = 1;
  int64_t conv_size_ = 0, ssm_size_ = 0;  // elements per layer and direction
  Array<float> values_;                   // per layer and direction: conv_state, then ssm_state
  Array<double> pooled_;
};

}  // namespace mambascope::model
