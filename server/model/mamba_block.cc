#include "server/model/mamba_block.h"

#include "server/kernels/gemm.h"
#include "server/kernels/rms_norm.h"
#include "server/model/mixer.h"

namespace mambascope::model {

void ReserveBlock(const ModelConfig& config, const PackedSequences& packed, Workspace& workspace) {
  const int64_t tokens = packed.tokens();
  workspace.h.Reserve(tokens * config.d_model);
  workspace.u.Reserve(tokens * config.d_model);
  workspace.xz.Reserve(tokens * config.in_proj_rows());
  workspace.x.Reserve(tokens * config.conv_channels());
  if (config.family != Family::kMamba2) {
    workspace.selective.Reserve(tokens * config.selective_width());
    workspace.dt.Reserve(tokens * config.d_inner);
  }
  workspace.gated.Reserve(tokens * config.d_inner);
  if (config.directions() == 2) {
    workspace.flipped_xz.Reserve(tokens * 2 * config.d_inner);
    workspace.flipped_gated.Reserve(tokens * config.d_inner);
  }
  if (packed.traced) workspace.y.Reserve(tokens * config.d_inner);
  workspace.out.Reserve(tokens * config.d_model);
}

int64_t BlockFloats(const ModelConfig& config, bool traced) {
  int64_t floats = 3 * config.d_model + config.in_proj_rows() + config.conv_channels();
  if (config.family != Family::kMamba2) floats += config.selective_width() + config.d_inner;
  floats += config.d_inner;
  if (config.directions() == 2) floats += 3 * config.d_inner;
  return traced ? floats + config.d_inner : floats;
}

void RunBlock(ThreadPool& pool, const ModelConfig& config, const LayerWeights& weights,
              int32_t layer, const PackedSequences& packed, Workspace& workspace) {
  const int64_t tokens = packed.tokens(), d_model = config.d_model, d_inner = config.d_inner;
  const int64_t wide = config.in_proj_rows();
  Workspace& w = workspace;

  kernels::RmsNorm(pool, w.h.data(), weights.norm, config.norm_eps, tokens, d_model, w.u.data());
  kernels::Linear(pool, {w.u.data(), tokens, d_model, d_model}, weights.in_proj,
                  weights.in_proj_bias, {w.xz.data(), tokens, wide, wide});
  const MixerPass pass{pool, config, weights, layer, packed, workspace};
  switch (config.family) {
    case Family::kMamba:
    case Family::kFalconMamba:
      RunSelectiveMixer(pass);
      break;
    case Family::kMamba2:
      RunHeadedMixer(pass);
      break;
    case Family::kVim:
      RunBidirectionalMixer(pass);
      break;
  }
  kernels::Linear(pool, {w.gated.data(), tokens, d_inner, d_inner}, weights.out_proj,
                  weights.out_proj_bias, {w.out.data(), tokens, d_model, d_model});
  kernels::AddInPlace(pool, w.out.data(), tokens * d_model, w.h.data());
}

}  // namespace mambascope::model
