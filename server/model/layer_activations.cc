#include "server/model/layer_activations.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "server/kernels/causal_conv1d.h"
#include "server/kernels/flip.h"
#include "server/kernels/gemm.h"
#include "server/kernels/rms_norm.h"
#include "server/kernels/selective_scan.h"
#include "server/kernels/ssd_scan.h"

namespace mambascope::model {
namespace {

// One layer of one sequence, that starts from nothing.
struct Once {
  ThreadPool& pool;
  const ModelConfig& config;
  const LayerWeights& weights;
  int64_t tokens;
  int32_t seq_start[2];
};

void Convolve(const Once& once, const BranchWeights& branch, const float* x_in,
              kernels::Activation activation, float* out) {
  const ModelConfig& config = once.config;
  std::vector<float> state(int64_t{config.d_conv - 1} * config.conv_channels(), 0);
  float* const states[] = {state.data()};
  kernels::ConvInputs conv;
  conv.x_in = x_in;
  conv.x_stride = config.in_proj_rows();
  conv.channels = config.conv_channels();
  conv.taps = config.d_conv;
  conv.weight = branch.conv1d;
  conv.bias = branch.conv1d_bias;
  conv.activation = activation;
  conv.seq_start = once.seq_start;
  kernels::CausalConv1d(once.pool, conv, {out, states});
}

// c and x = f(c).
void RunConvolution(const Once& once, int32_t direction, const float* x_in,
                    LayerActivations::Branch& out) {
  const int64_t values = once.tokens * once.config.conv_channels();
  out.c.Reserve(values);
  out.x.Reserve(values);
  const BranchWeights& branch = once.weights.branches[direction];
  Convolve(once, branch, x_in, kernels::Activation::kIdentity, out.c.data());
  Convolve(once, branch, x_in, once.config.conv_activation, out.x.data());
}

// What follows x in a Mamba-1 scan; `z` has in_proj's stride.
void RunSelective(const Once& once, int32_t direction, const float* z,
                  LayerActivations::Branch& out, float* gated) {
  const ModelConfig& config = once.config;
  const BranchWeights& branch = once.weights.branches[direction];
  const int64_t tokens = once.tokens, d_inner = config.d_inner, d_state = config.d_state;
  const int64_t dt_rank = config.dt_rank, width = config.selective_width();
  out.selective.Reserve(tokens * width);
  out.delta.Reserve(tokens * d_inner);
  out.y.Reserve(tokens * d_inner);
  kernels::Linear(once.pool, {out.x.data(), tokens, d_inner, d_inner}, branch.x_proj, nullptr,
                  {out.selective.data(), tokens, width, width});
  if (config.family == Family::kFalconMamba) {
    out.raw_selective.Reserve(tokens * width);
    std::copy_n(out.selective.data(), tokens * width, out.raw_selective.data());
    float* part = out.selective.data();
    for (const int64_t cols : {dt_rank, d_state, d_state}) {
      kernels::RmsScaleInPlace(once.pool, part, tokens, cols, width, config.mixer_rms_eps);
      part += cols;
    }
  }
  kernels::Linear(once.pool, {out.selective.data(), tokens, dt_rank, width}, branch.dt_proj,
                  branch.dt_bias, {out.delta.data(), tokens, d_inner, d_inner});

  std::vector<float> state(d_state * d_inner, 0);
  float* const states[] = {state.data()};
  kernels::ScanInputs scan;
  scan.d_inner = d_inner;
  scan.d_state = d_state;
  scan.x = out.x.data();
  scan.dt = out.delta.data();
  scan.z = z;
  scan.z_stride = config.in_proj_rows();
  scan.A = branch.A;
  scan.B = out.selective.data() + dt_rank;
  scan.C = scan.B + d_state;
  scan.bc_stride = width;
  scan.D = branch.D;
  scan.seq_start = once.seq_start;
  kernels::SelectiveScan(once.pool, scan, {gated, out.y.data(), states});
  const std::span<float> delta(out.delta.data(), tokens * d_inner);
  kernels::Softplus(once.pool, delta, delta);
}

void RunBothWays(const Once& once, LayerActivations& out) {
  const int64_t tokens = once.tokens, d_inner = once.config.d_inner;
  out.flipped.Reserve(tokens * d_inner);
  RunSelective(once, 0, out.in.data() + d_inner, out.branches[0], out.gated.data());
  RunSelective(once, 1, out.flipped_in.data() + d_inner, out.branches[1], out.flipped.data());
  kernels::AddFlipped(once.pool, out.flipped.data(), d_inner, once.seq_start, 1.0f,
                      out.gated.data());
  if (!once.config.vision.divide_out) return;
  out.mixed.Reserve(tokens * d_inner);
  for (int64_t i = 0; i < tokens * d_inner; ++i) out.mixed[i] = 0.5f * out.gated[i];
}

// What follows xBC in a Mamba-2 scan.
void RunHeaded(const Once& once, LayerActivations& out) {
  const ModelConfig& config = once.config;
  const BranchWeights& branch = once.weights.branches[0];
  const InProjLayout layout = InProjLayoutOf(config);
  const int64_t tokens = once.tokens, d_inner = config.d_inner, groups = config.groups;
  LayerActivations::Branch& scanned = out.branches[0];
  scanned.delta.Reserve(tokens * config.heads);
  scanned.y.Reserve(tokens * d_inner);
  kernels::SsdDelta(once.pool, out.in.data() + layout.dt, layout.stride, branch.dt_bias,
                    config.delta_min, config.delta_max, tokens, config.heads, scanned.delta.data());
  std::vector<float> state(int64_t{config.heads} * config.d_state * config.head_dim, 0);
  float* const states[] = {state.data()};
  kernels::SsdInputs scan;
  scan.heads = config.heads;
  scan.head_dim = config.head_dim;
  scan.groups = groups;
  scan.d_state = config.d_state;
  scan.x = scanned.x.data();
  scan.B = scan.x + d_inner;
  scan.C = scan.B + groups * config.d_state;
  scan.xbc_stride = config.conv_channels();
  scan.dt = out.in.data() + layout.dt;
  scan.dt_stride = layout.stride;
  scan.dt_bias = branch.dt_bias;
  scan.delta_min = config.delta_min;
  scan.delta_max = config.delta_max;
  scan.A = branch.A;
  scan.D = branch.D;
  scan.z = out.in.data() + layout.z;
  scan.z_stride = layout.stride;
  scan.seq_start = once.seq_start;
  kernels::SsdScan(once.pool, scan, {out.gated.data(), scanned.y.data(), states});

  out.mixed.Reserve(tokens * d_inner);
  kernels::GroupRmsNorm(once.pool, out.gated.data(), once.weights.mixer_norm, config.norm_eps,
                        tokens, d_inner, groups, out.mixed.data());
  out.norm_scale.Reserve(tokens * groups);
  const int64_t width = d_inner / groups;
  once.pool.Split(tokens * groups, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      double squares = 0;
      for (int64_t k = r * width; k < (r + 1) * width; ++k) {
        squares += double{out.gated[k]} * out.gated[k];
      }
      out.norm_scale[r] =
          static_cast<float>(1 / std::sqrt(squares / static_cast<double>(width) + config.norm_eps));
    }
  });
}

}  // namespace

InProjLayout InProjLayoutOf(const ModelConfig& config) {
  const int64_t d_inner = config.d_inner, stride = config.in_proj_rows();
  if (config.family != Family::kMamba2) return {d_inner, 0, stride, 0};
  return {0, d_inner, stride, d_inner + config.conv_channels()};
}

void RunLayerOnce(ThreadPool& pool, const MambaModel& model, int32_t layer, const float* stream,
                  int64_t tokens, LayerParts parts, LayerActivations& out) {
  const ModelConfig& config = model.config();
  const LayerWeights& weights = model.weights().layer(layer);
  const Once once{pool, config, weights, tokens, {0, static_cast<int32_t>(tokens)}};
  const int64_t d_model = config.d_model, wide = config.in_proj_rows();
  const int64_t x_in = InProjLayoutOf(config).x_in;
  out.tokens = tokens;
  out.u.Reserve(tokens * d_model);
  out.in.Reserve(tokens * wide);
  kernels::RmsNorm(pool, stream, weights.norm, config.norm_eps, tokens, d_model, out.u.data());
  kernels::Linear(pool, {out.u.data(), tokens, d_model, d_model}, weights.in_proj,
                  weights.in_proj_bias, {out.in.data(), tokens, wide, wide});
  RunConvolution(once, 0, out.in.data() + x_in, out.branches[0]);
  if (config.directions() == 2) {
    out.flipped_in.Reserve(tokens * wide);
    kernels::FlipRows(pool, out.in.data(), wide, once.seq_start, out.flipped_in.data());
    RunConvolution(once, 1, out.flipped_in.data(), out.branches[1]);
  }
  if (parts == LayerParts::kConvolution) return;

  out.gated.Reserve(tokens * config.d_inner);
  switch (config.family) {
    case Family::kMamba:
    case Family::kFalconMamba:
      RunSelective(once, 0, out.in.data() + config.d_inner, out.branches[0], out.gated.data());
      break;
    case Family::kMamba2:
      RunHeaded(once, out);
      break;
    case Family::kVim:
      RunBothWays(once, out);
      break;
  }
}

int64_t LayerActivationsBytes(const ModelConfig& config, int64_t tokens) {
  const int64_t d_inner = config.d_inner;
  const int64_t branch =
      2 * config.conv_channels() + 2 * config.selective_width() + config.maps() + d_inner;
  const int64_t both = config.directions() == 2 ? config.in_proj_rows() + d_inner : 0;
  const int64_t a_token = config.d_model + config.in_proj_rows() + both +
                          config.directions() * branch + 2 * d_inner + config.groups;
  const int64_t fixed = (config.d_conv + 2 * config.d_state) * config.conv_channels();
  return 4 * (tokens * a_token + fixed);
}

kernels::ScanParameters ScanOf(const MambaModel& model, int32_t layer, int32_t direction,
                               LayerActivations& activations) {
  const ModelConfig& config = model.config();
  LayerActivations::Branch& branch = activations.branches[direction];
  const BranchWeights& weights = model.weights().layer(layer).branches[direction];
  kernels::ScanParameters scan;
  scan.tokens = activations.tokens;
  scan.d_inner = config.maps();
  scan.d_state = config.d_state;
  scan.delta = branch.delta.data();
  if (config.family == Family::kMamba2) {
    branch.A.Reserve(int64_t{config.d_state} * config.heads);
    for (int32_t n = 0; n < config.d_state; ++n) {
      std::copy_n(weights.A, config.heads, branch.A.data() + n * config.heads);
    }
    scan.A = branch.A.data();
    scan.B = branch.x.data() + config.d_inner;
    scan.bc_stride = config.conv_channels();
  } else {
    scan.A = weights.A;
    scan.B = branch.selective.data() + config.dt_rank;
    scan.bc_stride = config.selective_width();
  }
  scan.C = scan.B + config.groups * config.d_state;
  return scan;
}

}  // namespace mambascope::model
