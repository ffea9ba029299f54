#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/base/array.h"
#include "server/explain/subject.h"
#include "server/model/layer_activations.h"

namespace mambascope::explain {

// The ssm_state of one layer after some tokens, by the pass's own scan kernels from the layer's
// start on, in pieces between those tokens (so with the pass's bits). Borrows everything it is
// given.
class StateScan {
 public:
  // `direction` 1 is Vim's backward scan; tokens stand in a scan's own order throughout.
  StateScan(const model::ModelConfig& config, int32_t direction);
  static int64_t MemoryBytes(const model::ModelConfig& config);

  // Before the first token of a layer, of which the convolution was computed once more.
  void Begin(const Subject& subject, int32_t layer, const model::LayerActivations& activations);
  // On to the state after the first `tokens` tokens; never backwards.
  void Advance(int64_t tokens);
  // Of one channel of d_inner and one state.
  float At(int32_t channel, int32_t state) const;

  // Tokens that one slice takes.
  static int64_t SliceTokens(const model::ModelConfig& config);

 private:
  void RunSelective(int64_t begin, int64_t end);
  void RunHeaded(int64_t begin, int64_t end);

  const model::ModelConfig& config_;
  const int32_t direction_;
  const Subject* subject_ = nullptr;
  const model::LayerActivations* activations_ = nullptr;
  int32_t layer_ = 0;
  int64_t reached_ = 0;
  Array<float> state_;  // [d_state, d_inner]; Mamba-2: [heads, d_state, head_dim]
  Array<float> dt_, gated_;
};

}  // namespace mambascope::explain
