#include "server/model/mixer.h"

#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "server/kernels/causal_conv1d.h"
#include "server/kernels/flip.h"
#include "server/kernels/gemm.h"
#include "server/kernels/rms_norm.h"
#include "server/kernels/selective_scan.h"
#include "server/kernels/ssd_scan.h"

namespace mambascope::model {
namespace {

using States = absl::InlinedVector<float*, 16>;

States ConvStates(const MixerPass& pass, int32_t direction) {
  States states;
  for (const Piece& piece : pass.packed.pieces) {
    states.push_back(piece.state->conv_state(pass.layer, direction));
  }
  return states;
}

States SsmStates(const MixerPass& pass, int32_t direction) {
  States states;
  for (const Piece& piece : pass.packed.pieces) {
    states.push_back(piece.state->ssm_state(pass.layer, direction));
  }
  return states;
}

// workspace.x = f(conv1d(x_in)), [tokens, conv_channels].
void Convolve(const MixerPass& pass, int32_t direction, const float* x_in) {
  const BranchWeights& branch = pass.weights.branches[direction];
  const States states = ConvStates(pass, direction);
  kernels::ConvInputs conv;
  conv.x_in = x_in;
  conv.x_stride = pass.config.in_proj_rows();
  conv.channels = pass.config.conv_channels();
  conv.taps = pass.config.d_conv;
  conv.weight = branch.conv1d;
  conv.bias = branch.conv1d_bias;
  conv.activation = pass.config.conv_activation;
  conv.seq_start = pass.packed.seq_start;
  kernels::CausalConv1d(pass.pool, conv, {pass.workspace.x.data(), states});
}

// What the traces keep of a scan whose inputs and outputs stand in the workspace: `copy` writes a
// token's selective numbers; channel d has the skip weight D[d / channels_per_skip].
template <typename Copy>
void Record(const MixerPass& pass, int32_t direction, int64_t channels_per_skip, Copy copy) {
  const ModelConfig& config = pass.config;
  const float* D = pass.weights.branches[direction].D;
  for (size_t s = 0; s < pass.packed.pieces.size(); ++s) {
    const Piece& piece = pass.packed.pieces[s];
    if (piece.trace == nullptr || !piece.trace->records_scans) continue;
    const std::vector<int32_t>& channels = piece.trace->checked_channels;
    LayerTrace& trace = piece.trace->layer(pass.layer, direction);
    const int64_t filled = piece.trace->tokens;
    float* selective = trace.selective.data() + filled * config.selective_width();
    float* x_out = trace.x_checked.data() + filled * channels.size();
    float* y_out = trace.y_checked.data() + filled * channels.size();
    for (int64_t i = pass.packed.seq_start[s]; i < pass.packed.seq_start[s + 1]; ++i) {
      copy(i, selective);
      selective += config.selective_width();
      const float* x = pass.workspace.x.data() + i * config.conv_channels();
      const float* y = pass.workspace.y.data() + i * config.d_inner;
      for (const int32_t d : channels) {
        *x_out++ = x[d];
        *y_out++ = y[d] + D[d / channels_per_skip] * x[d];
      }
    }
  }
}

// One selective scan with its convolution, from xz [tokens, 2 d_inner] to gated [tokens, d_inner].
void RunBranch(const MixerPass& pass, int32_t direction, const float* xz, float* gated) {
  const ModelConfig& config = pass.config;
  const BranchWeights& branch = pass.weights.branches[direction];
  Workspace& w = pass.workspace;
  const int64_t tokens = pass.packed.tokens(), d_inner = config.d_inner, d_state = config.d_state;
  const int64_t dt_rank = config.dt_rank, width = config.selective_width();

  Convolve(pass, direction, xz);
  kernels::Linear(pass.pool, {w.x.data(), tokens, d_inner, d_inner}, branch.x_proj, nullptr,
                  {w.selective.data(), tokens, width, width});
  if (config.family == Family::kFalconMamba) {
    float* part = w.selective.data();
    for (const int64_t cols : {dt_rank, d_state, d_state}) {
      kernels::RmsScaleInPlace(pass.pool, part, tokens, cols, width, config.mixer_rms_eps);
      part += cols;
    }
  }
  kernels::Linear(pass.pool, {w.selective.data(), tokens, dt_rank, width}, branch.dt_proj,
                  branch.dt_bias, {w.dt.data(), tokens, d_inner, d_inner});

  const States states = SsmStates(pass, direction);
  kernels::ScanInputs scan;
  scan.d_inner = d_inner;
  scan.d_state = d_state;
  scan.x = w.x.data();
  scan.dt = w.dt.data();
  scan.z = xz + d_inner;
  scan.z_stride = 2 * d_inner;
  scan.A = branch.A;
  scan.B = w.selective.data() + dt_rank;
  scan.C = scan.B + d_state;
  scan.bc_stride = width;
  scan.D = branch.D;
  scan.seq_start = pass.packed.seq_start;
  kernels::SelectiveScan(pass.pool, scan,
                         {gated, pass.packed.traced ? w.y.data() : nullptr, states});
  Record(pass, direction, 1,
         [&](int64_t i, float* to) { std::copy_n(w.selective.data() + i * width, width, to); });
}

}  // namespace

void RunSelectiveMixer(const MixerPass& pass) {
  RunBranch(pass, 0, pass.workspace.xz.data(), pass.workspace.gated.data());
}

void RunBidirectionalMixer(const MixerPass& pass) {
  const int64_t d_inner = pass.config.d_inner;
  Workspace& w = pass.workspace;
  RunBranch(pass, 0, w.xz.data(), w.gated.data());
  kernels::FlipRows(pass.pool, w.xz.data(), 2 * d_inner, pass.packed.seq_start,
                    w.flipped_xz.data());
  RunBranch(pass, 1, w.flipped_xz.data(), w.flipped_gated.data());
  const float scale = pass.config.vision.divide_out ? 0.5f : 1.0f;
  kernels::AddFlipped(pass.pool, w.flipped_gated.data(), d_inner, pass.packed.seq_start, scale,
                      w.gated.data());
}

void RunHeadedMixer(const MixerPass& pass) {
  const ModelConfig& config = pass.config;
  const BranchWeights& branch = pass.weights.branches[0];
  Workspace& w = pass.workspace;
  const int64_t tokens = pass.packed.tokens(), d_inner = config.d_inner;
  const int64_t states_of_groups = int64_t{config.groups} * config.d_state;
  const float *xbc = w.xz.data() + d_inner, *dt = xbc + config.conv_channels();

  Convolve(pass, 0, xbc);
  const States states = SsmStates(pass, 0);
  kernels::SsdInputs scan;
  scan.heads = config.heads;
  scan.head_dim = config.head_dim;
  scan.groups = config.groups;
  scan.d_state = config.d_state;
  scan.x = w.x.data();
  scan.B = scan.x + d_inner;
  scan.C = scan.B + states_of_groups;
  scan.xbc_stride = config.conv_channels();
  scan.dt = dt;
  scan.dt_stride = config.in_proj_rows();
  scan.dt_bias = branch.dt_bias;
  scan.delta_min = config.delta_min;
  scan.delta_max = config.delta_max;
  scan.A = branch.A;
  scan.D = branch.D;
  scan.z = w.xz.data();
  scan.z_stride = config.in_proj_rows();
  scan.seq_start = pass.packed.seq_start;
  kernels::SsdScan(pass.pool, scan,
                   {w.gated.data(), pass.packed.traced ? w.y.data() : nullptr, states});
  kernels::GroupRmsNorm(pass.pool, w.gated.data(), pass.weights.mixer_norm, config.norm_eps, tokens,
                        d_inner, config.groups, w.gated.data());
  Record(pass, 0, config.head_dim, [&](int64_t i, float* to) {
    to = std::copy_n(dt + i * config.in_proj_rows(), config.heads, to);
    std::copy_n(scan.B + i * scan.xbc_stride, 2 * states_of_groups, to);
  });
}

}  // namespace mambascope::model
