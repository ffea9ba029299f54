#pragma once

#include <cstdint>

#include "server/base/array.h"
#include "server/base/thread_pool.h"
#include "server/kernels/backward_rule.h"
#include "server/model/layer_activations.h"
#include "server/model/mamba_model.h"

namespace mambascope::model {

// Scratch of RunLayerBackward and what it leaves besides the stream's gradient; kept between
// layers.
struct LayerGradient {
  Array<float> gated;  // [tokens, d_inner] of LayerActivations::gated

  // Scratch.
  Array<float> flipped_gated, dyd, dx, in, flipped_in, selective, delta, u;
};

// One layer backwards, for one whole sequence: `dh` [tokens, d_model], the gradient of a number f
// by the stream that leaves the layer, becomes that by `stream`, which entered it. `activations`
// are RunLayerOnce's of all parts. kRelevance: MambaLRP's rules (methods.md, section 6; arXiv
// 2406.07592) in place of the ordinary derivative; returns what the layer's biases then take, the
// sum of b df/db over in_proj, conv1d and out_proj (0 with kGradient, which is not asked for it).
// A sequence at a time, never packed.
double RunLayerBackward(ThreadPool& pool, const MambaModel& model, int32_t layer,
                        const float* stream, LayerActivations& activations,
                        kernels::BackwardRule rule, LayerGradient& gradient, float* dh);
// Upper bound of what it allocates, activations not included.
int64_t LayerGradientBytes(const ModelConfig& config, int64_t tokens, int threads,
                           kernels::BackwardRule rule);

}  // namespace mambascope::model
