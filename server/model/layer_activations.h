#pragma once

#include <cstdint>

#include "server/base/array.h"
#include "server/base/thread_pool.h"
#include "server/kernels/hidden_attention.h"
#include "server/model/mamba_model.h"

namespace mambascope::model {

// What one layer computed between its norm and out_proj for one whole sequence (methods.md, section
// 1), once more, from the stream that entered it: with the pass's own kernels, so with its bits.
// Shapes are row-major, `tokens` rows. Kept between layers; grows to the largest.
struct LayerActivations {
  // One selective scan with its convolution. Direction 1 is Vim's backward scan, whose rows stand
  // in its own order, the last token first.
  struct Branch {
    Array<float> c;              // [tokens, conv_channels] convolution, before its activation
    Array<float> x;              // [tokens, conv_channels] f(c); Mamba-2: x, then B, C
    Array<float> raw_selective;  // Falcon-Mamba: [tokens, selective_width] before the norms
    Array<float> selective;      // [tokens, selective_width] as in LayerTrace; of Mamba-2 unused
    Array<float> delta;          // [tokens, maps] after softplus and clamp
    Array<float> y;              // [tokens, d_inner] scan output without D x
    Array<float> A;              // Mamba-2: [d_state, heads], for ScanOf
  };

  Array<float> u;           // [tokens, d_model]
  Array<float> in;          // [tokens, in_proj_rows] in_proj's output: x_in, z; Mamba-2: z, xBC, dt
  Array<float> flipped_in;  // Vim: its rows in reverse order
  Branch branches[2];
  Array<float> gated;  // [tokens, d_inner] (y + D x) SiLU(z), of Vim both directions added
  Array<float> mixed;  // [tokens, d_inner] out_proj's input; empty where that is `gated` (MixedOf)
  Array<float> norm_scale;  // Mamba-2: [tokens, groups] 1 / RMS of the gated norm
  Array<float> flipped;     // scratch of Vim
  int64_t tokens = 0;
};

// How much of a layer is wanted.
enum class LayerParts {
  kConvolution,  // u, in, c, x
  kAll,
};

// `stream` [tokens, d_model] enters the layer.
void RunLayerOnce(ThreadPool& pool, const MambaModel& model, int32_t layer, const float* stream,
                  int64_t tokens, LayerParts parts, LayerActivations& out);
// Upper bound of what RunLayerOnce allocates.
int64_t LayerActivationsBytes(const ModelConfig& config, int64_t tokens);

// out_proj's input, [tokens, d_inner].
inline const float* MixedOf(const LayerActivations& activations) {
  return activations.mixed.empty() ? activations.gated.data() : activations.mixed.data();
}

// Where the layer's z and convolution input stand in a row of `in`.
struct InProjLayout {
  int64_t z = 0, x_in = 0, stride = 0;
  int64_t dt = 0;  // Mamba-2
};
InProjLayout InProjLayoutOf(const ModelConfig& config);

// The scan parameters of one direction, views into `activations`: as MambaModel::ScanParametersOf.
kernels::ScanParameters ScanOf(const MambaModel& model, int32_t layer, int32_t direction,
                               LayerActivations& activations);

}  // namespace mambascope::model
