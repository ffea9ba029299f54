#include "server/model/mamba_block.h"

#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "server/kernels/causal_conv1d.h"
#include "server/kernels/gemm.h"
#include "server/kernels/rms_norm.h"
#include "server/kernels/selective_scan.h"

namespace mambascope::model {
namespace {

// What a piece's trace keeps of this layer. Small copies; see layer_trace.h.
void Record(const Piece& piece, int64_t first, const ModelConfig& config,
            const LayerWeights& weights, int32_t layer, const Workspace& workspace) {
  const int64_t d_inner = config.d_inner, width = config.dt_rank + 2 * config.d_state;
  const int64_t count = piece.tokens.size(), filled = piece.trace->tokens;
  const std::vector<int32_t>& channels = piece.trace->checked_channels;
  LayerTrace& trace = piece.trace->layers[layer];

  std::copy_n(workspace.x_dbl.data() + first * width, count * width,
              trace.x_dbl.data() + filled * width);
  float* x_out = trace.x_checked.data() + filled * channels.size();
  float* y_out = trace.y_checked.data() + filled * channels.size();
  for (int64_t i = first; i < first + count; ++i) {
    const float* x = workspace.x.data() + i * d_inner;
    const float* y = workspace.y.data() + i * d_inner;
    for (const int32_t d : channels) {
      *x_out++ = x[d];
      *y_out++ = y[d] + weights.D[d] * x[d];
    }
  }
}

}  // namespace

void ReserveBlock(const ModelConfig& config, const PackedSequences& packed, Workspace& workspace) {
  const int64_t tokens = packed.tokens();
  workspace.h.Reserve(tokens * config.d_model);
  workspace.u.Reserve(tokens * config.d_model);
  workspace.xz.Reserve(tokens * 2 * config.d_inner);
  workspace.x.Reserve(tokens * config.d_inner);
  workspace.x_dbl.Reserve(tokens * (config.dt_rank + 2 * config.d_state));
  workspace.dt.Reserve(tokens * config.d_inner);
  workspace.gated.Reserve(tokens * config.d_inner);
  if (packed.traced) workspace.y.Reserve(tokens * config.d_inner);
  workspace.out.Reserve(tokens * config.d_model);
}

void RunBlock(ThreadPool& pool, const ModelConfig& config, const LayerWeights& weights,
              int32_t layer, const PackedSequences& packed, Workspace& workspace) {
  const int64_t tokens = packed.tokens();
  const int64_t d_model = config.d_model, d_inner = config.d_inner, d_state = config.d_state;
  const int64_t dt_rank = config.dt_rank, width = dt_rank + 2 * d_state;
  Workspace& w = workspace;

  absl::InlinedVector<float*, 16> conv_states, ssm_states;
  for (const Piece& piece : packed.pieces) {
    conv_states.push_back(piece.state->conv_state(layer));
    ssm_states.push_back(piece.state->ssm_state(layer));
  }

  kernels::RmsNorm(pool, w.h.data(), weights.norm, config.norm_eps, tokens, d_model, w.u.data());
  kernels::Linear(pool, {w.u.data(), tokens, d_model, d_model},
                  {weights.in_proj, 2 * d_inner, d_model, d_model}, weights.in_proj_bias,
                  {w.xz.data(), tokens, 2 * d_inner, 2 * d_inner});

  kernels::ConvInputs conv;
  conv.x_in = w.xz.data();
  conv.x_stride = 2 * d_inner;
  conv.channels = d_inner;
  conv.taps = config.d_conv;
  conv.weight = weights.conv1d;
  conv.bias = weights.conv1d_bias;
  conv.activation = config.conv_activation;
  conv.seq_start = packed.seq_start;
  kernels::CausalConv1d(pool, conv, {w.x.data(), conv_states});

  kernels::Linear(pool, {w.x.data(), tokens, d_inner, d_inner},
                  {weights.x_proj, width, d_inner, d_inner}, nullptr,
                  {w.x_dbl.data(), tokens, width, width});
  kernels::Linear(pool, {w.x_dbl.data(), tokens, dt_rank, width},
                  {weights.dt_proj, d_inner, dt_rank, dt_rank}, weights.dt_proj_bias,
                  {w.dt.data(), tokens, d_inner, d_inner});

  kernels::ScanInputs scan;
  scan.d_inner = d_inner;
  scan.d_state = d_state;
  scan.x = w.x.data();
  scan.dt = w.dt.data();
  scan.z = w.xz.data() + d_inner;
  scan.z_stride = 2 * d_inner;
  scan.A = weights.A;
  scan.B = w.x_dbl.data() + dt_rank;
  scan.C = w.x_dbl.data() + dt_rank + d_state;
  scan.bc_stride = width;
  scan.D = weights.D;
  scan.seq_start = packed.seq_start;
  kernels::SelectiveScan(pool, scan,
                         {w.gated.data(), packed.traced ? w.y.data() : nullptr, ssm_states});

  kernels::Linear(pool, {w.gated.data(), tokens, d_inner, d_inner},
                  {weights.out_proj, d_model, d_inner, d_inner}, weights.out_proj_bias,
                  {w.out.data(), tokens, d_model, d_model});
  kernels::AddInPlace(pool, w.out.data(), tokens * d_model, w.h.data());

  for (size_t s = 0; s < packed.pieces.size(); ++s) {
    const Piece& piece = packed.pieces[s];
    if (piece.trace != nullptr) Record(piece, packed.seq_start[s], config, weights, layer, w);
  }
}

}  // namespace mambascope::model
