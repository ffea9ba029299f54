#pragma once

#include <cstdint>
#include <span>

#include "server/base/thread_pool.h"
#include "server/model/mamba_model.h"

namespace mambascope::model {

// Final norm and head on the wanted rows of all pieces at once, so that the head's matrix is read
// once: logits = head RmsNorm(h) + bias. Where the mean is pooled, every row is normalised and
// added to its sequence's state, and the wanted rows are the means so far. Fills the pieces' logits
// and nonfinite_layer; workspace.h [rows, d_model] is the stream that leaves the last layer.
void RunHead(ThreadPool& pool, const ModelConfig& config, const WeightViews& weights,
             std::span<Piece> pieces, std::span<const int32_t> seq_start, Workspace& workspace);

}  // namespace mambascope::model
