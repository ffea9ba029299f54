#pragma once

#include <cstdint>
#include <span>

#include "server/base/thread_pool.h"
#include "server/model/config.h"
#include "server/model/mamba_model.h"
#include "server/model/weights.h"

namespace mambascope::model {

// The sequences of one packed pass, end to end. Borrowed until the call returns.
struct PackedSequences {
  std::span<const Piece> pieces;
  std::span<const int32_t> seq_start;  // [pieces + 1] first token of each, then `tokens`
  bool traced = false;                 // whether any piece has a trace

  int64_t tokens() const { return seq_start.back(); }
};

// Grows the buffers that RunBlock uses; all of them, because growing loses what they held.
void ReserveBlock(const ModelConfig& config, const PackedSequences& packed, Workspace& workspace);

// What ReserveBlock holds of each token of a pass, in floats.
int64_t BlockFloats(const ModelConfig& config, bool traced);

// One layer: workspace.h += mixer(RmsNorm(workspace.h)). Advances each piece's state of this layer
// and writes what its trace asks for at the trace's `tokens`, which stays as it is: the pass moves
// it when all layers are through.
void RunBlock(ThreadPool& pool, const ModelConfig& config, const LayerWeights& weights,
              int32_t layer, const PackedSequences& packed, Workspace& workspace);

}  // namespace mambascope::model
