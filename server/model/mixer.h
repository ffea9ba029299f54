#pragma once

#include <cstdint>

#include "server/base/thread_pool.h"
#include "server/model/mamba_block.h"

namespace mambascope::model {

// What stands between in_proj and out_proj (methods.md, section 1), as steps on the workspace: from
// workspace.xz, in_proj's output, to workspace.gated, out_proj's input, [tokens, d_inner]. All
// advance the pieces' states and fill their traces.
struct MixerPass {
  ThreadPool& pool;
  const ModelConfig& config;
  const LayerWeights& weights;
  int32_t layer;
  const PackedSequences& packed;
  Workspace& workspace;
};

void RunSelectiveMixer(const MixerPass& pass);      // Mamba-1 and Falcon-Mamba
void RunHeadedMixer(const MixerPass& pass);         // Mamba-2
void RunBidirectionalMixer(const MixerPass& pass);  // Vim

}  // namespace mambascope::model
