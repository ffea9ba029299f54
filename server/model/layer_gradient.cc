#include "server/model/layer_gradient.h"

#include <algorithm>

#include "server/kernels/conv_backward.h"
#include "server/kernels/delta_gradient.h"
#include "server/kernels/flip.h"
#include "server/kernels/gate_backward.h"
#include "server/kernels/gemm.h"
#include "server/kernels/linear_backward.h"
#include "server/kernels/norm_backward.h"
#include "server/kernels/scan_backward.h"
#include "server/kernels/ssd_backward.h"

namespace mambascope::model {
namespace {

using kernels::BackwardRule;

// One layer on its way back.
struct Back {
  ThreadPool& pool;
  const MambaModel& model;
  const ModelConfig& config;
  const LayerWeights& weights;
  int32_t layer;
  BackwardRule rule;
  LayerActivations& a;
  LayerGradient& g;
  const int64_t tokens;
  const InProjLayout layout;
  double bias_relevance = 0;

  bool frozen() const { return rule == BackwardRule::kRelevance; }
};

// sum_i bias . gradient_i, in double, row after row.
double BiasShare(const Back& back, const float* bias, const float* gradient, int64_t stride,
                 int64_t cols) {
  if (bias == nullptr || !back.frozen()) return 0;
  double sum = 0;
  for (int64_t i = 0; i < back.tokens; ++i) {
    for (int64_t d = 0; d < cols; ++d) sum += double{bias[d]} * gradient[i * stride + d];
  }
  return sum;
}

// g.dx = D dyd in the first d_inner columns of each row.
void BackThroughSkip(const Back& back, const float* D) {
  const int64_t d_inner = back.config.d_inner, stride = back.config.conv_channels();
  const int64_t of_skip = back.config.channels_per_map();
  back.pool.Split(back.tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* dyd = back.g.dyd.data() + i * d_inner;
      float* dx = back.g.dx.data() + i * stride;
      for (int64_t d = 0; d < d_inner; ++d) dx[d] = D[d / of_skip] * dyd[d];
      std::fill(dx + d_inner, dx + stride, 0.0f);
    }
  });
}

// From g.dyd to g.dx through a Mamba-1 scan, and unless they are frozen through delta, B and C.
void BackThroughSelectiveScan(Back& back, int32_t direction) {
  const ModelConfig& config = back.config;
  const BranchWeights& branch = back.weights.branches[direction];
  LayerActivations::Branch& a = back.a.branches[direction];
  LayerGradient& g = back.g;
  const int64_t tokens = back.tokens, d_inner = config.d_inner;
  const int64_t width = config.selective_width(), dt_rank = config.dt_rank;
  const kernels::ScanParameters scan = ScanOf(back.model, back.layer, direction, back.a);
  if (back.frozen()) {
    kernels::ScanAdjoint(back.pool, scan, g.dyd.data(), g.dx.data(), /*accumulate=*/true);
    return;
  }
  g.delta.Reserve(tokens * d_inner);
  g.selective.Reserve(tokens * width);
  float* dB = g.selective.data() + dt_rank;
  kernels::ScanBackward(
      back.pool, scan, a.x.data(), g.dyd.data(),
      {g.dx.data(), /*accumulate_dx=*/true, g.delta.data(), dB, dB + config.d_state, width});
  kernels::SoftplusGradient(back.pool, {a.delta.data(), size_t(tokens * d_inner)},
                            {g.delta.data(), size_t(tokens * d_inner)});
  kernels::LinearTransposed(back.pool, {g.delta.data(), tokens, d_inner, d_inner}, branch.dt_proj,
                            /*accumulate=*/false, {g.selective.data(), tokens, dt_rank, width});
  if (config.family == Family::kFalconMamba) {
    int64_t first = 0;
    for (const int64_t cols : {dt_rank, int64_t{config.d_state}, int64_t{config.d_state}}) {
      kernels::RmsScaleBackwardInPlace(back.pool, a.raw_selective.data() + first, width, tokens,
                                       cols, config.mixer_rms_eps, g.selective.data() + first,
                                       width);
      first += cols;
    }
  }
  kernels::LinearTransposed(back.pool, {g.selective.data(), tokens, width, width}, branch.x_proj,
                            /*accumulate=*/true, {g.dx.data(), tokens, d_inner, d_inner});
}

// From g.dyd to g.dx through Mamba-2's scan, and unless they are frozen to B, C and dt.
void BackThroughHeadedScan(Back& back) {
  const ModelConfig& config = back.config;
  const BranchWeights& branch = back.weights.branches[0];
  const LayerActivations::Branch& a = back.a.branches[0];
  LayerGradient& g = back.g;
  const int64_t wide = config.conv_channels(), states = int64_t{config.groups} * config.d_state;
  kernels::SsdBackwardInputs scan;
  scan.tokens = back.tokens;
  scan.heads = config.heads;
  scan.head_dim = config.head_dim;
  scan.groups = config.groups;
  scan.d_state = config.d_state;
  scan.x = a.x.data();
  scan.B = scan.x + config.d_inner;
  scan.C = scan.B + states;
  scan.xbc_stride = wide;
  scan.delta = a.delta.data();
  scan.A = branch.A;
  scan.dy = g.dyd.data();
  float* ddt = g.in.data() + back.layout.dt;
  if (back.frozen()) {
    kernels::SsdAdjoint(back.pool, scan, g.dx.data(), wide, /*accumulate=*/true);
    for (int64_t i = 0; i < back.tokens; ++i) {
      std::fill_n(ddt + i * back.layout.stride, config.heads, 0.0f);
    }
    return;
  }
  g.delta.Reserve(back.tokens * config.heads);
  kernels::SsdGradients out;
  out.dx = g.dx.data();
  out.accumulate_dx = true;
  out.dB = g.dx.data() + config.d_inner;
  out.dC = out.dB + states;
  out.xbc_stride = wide;
  out.ddelta = g.delta.data();
  kernels::SsdBackward(back.pool, scan, out);
  kernels::SsdDeltaGradient(back.pool, back.a.in.data() + back.layout.dt, back.layout.stride,
                            branch.dt_bias, config.delta_min, config.delta_max, back.tokens,
                            config.heads, g.delta.data(), ddt, back.layout.stride);
}

// One scan with its gate and convolution: from `dgated` to `din`, rows of in_proj's output in the
// scan's own order.
void BackThroughBranch(Back& back, int32_t direction, const float* in, const float* dgated,
                       float* din) {
  const ModelConfig& config = back.config;
  const BranchWeights& branch = back.weights.branches[direction];
  LayerActivations::Branch& a = back.a.branches[direction];
  LayerGradient& g = back.g;
  const int64_t tokens = back.tokens, d_inner = config.d_inner, wide = config.conv_channels();
  g.dyd.Reserve(tokens * d_inner);
  g.dx.Reserve(tokens * wide);
  kernels::GateBackwardInputs gate;
  gate.tokens = tokens;
  gate.d_inner = d_inner;
  gate.rule = back.rule;
  gate.dgated = dgated;
  gate.y = a.y.data();
  gate.x = a.x.data();
  gate.x_stride = wide;
  gate.z = in + back.layout.z;
  gate.z_stride = back.layout.stride;
  gate.D = branch.D;
  gate.channels_per_skip = config.channels_per_map();
  kernels::GateBackward(back.pool, gate, {g.dyd.data(), din + back.layout.z, back.layout.stride});

  BackThroughSkip(back, branch.D);
  if (config.family == Family::kMamba2) {
    BackThroughHeadedScan(back);
  } else {
    BackThroughSelectiveScan(back, direction);
  }
  kernels::ActivationGradient(back.pool, a.c.data(), g.dx.data(), tokens, wide,
                              config.conv_activation, back.rule, g.dx.data());
  back.bias_relevance += BiasShare(back, branch.conv1d_bias, g.dx.data(), wide, wide);
  kernels::ConvBackwardInputs conv;
  conv.tokens = tokens;
  conv.channels = wide;
  conv.taps = config.d_conv;
  conv.dc = g.dx.data();
  conv.weight = branch.conv1d;
  kernels::CausalConv1dBackward(back.pool, conv, din + back.layout.x_in, back.layout.stride);
}

// From the gradient of out_proj's input, in g.gated, to that of `gated`.
void BackThroughMixed(Back& back) {
  const ModelConfig& config = back.config;
  LayerGradient& g = back.g;
  if (config.family == Family::kMamba2) {
    kernels::GroupRmsNormBackward(back.pool, back.a.gated.data(), back.weights.mixer_norm,
                                  config.norm_eps, back.tokens, config.d_inner, config.groups,
                                  g.gated.data(), back.frozen(), g.gated.data());
  } else if (config.family == Family::kVim && config.vision.divide_out) {
    for (int64_t i = 0; i < back.tokens * config.d_inner; ++i) g.gated[i] *= 0.5f;
  }
}

// From g.gated to g.in, the gradient of in_proj's output.
void BackThroughScans(Back& back) {
  const ModelConfig& config = back.config;
  LayerGradient& g = back.g;
  const int64_t tokens = back.tokens, d_inner = config.d_inner, wide = config.in_proj_rows();
  g.in.Reserve(tokens * wide);
  BackThroughBranch(back, 0, back.a.in.data(), g.gated.data(), g.in.data());
  if (config.directions() == 1) return;
  const int32_t seq_start[] = {0, static_cast<int32_t>(tokens)};
  g.flipped_gated.Reserve(tokens * d_inner);
  g.flipped_in.Reserve(tokens * wide);
  kernels::FlipRows(back.pool, g.gated.data(), d_inner, seq_start, g.flipped_gated.data());
  BackThroughBranch(back, 1, back.a.flipped_in.data(), g.flipped_gated.data(), g.flipped_in.data());
  kernels::AddFlipped(back.pool, g.flipped_in.data(), wide, seq_start, 1.0f, g.in.data());
}

}  // namespace

double RunLayerBackward(ThreadPool& pool, const MambaModel& model, int32_t layer,
                        const float* stream, LayerActivations& activations, BackwardRule rule,
                        LayerGradient& gradient, float* dh) {
  const ModelConfig& config = model.config();
  const LayerWeights& weights = model.weights().layer(layer);
  const int64_t tokens = activations.tokens;
  Back back{pool, model,       config,   weights, layer,
            rule, activations, gradient, tokens,  InProjLayoutOf(config)};
  const int64_t d_model = config.d_model, d_inner = config.d_inner, wide = config.in_proj_rows();
  gradient.gated.Reserve(tokens * d_inner);
  gradient.u.Reserve(tokens * d_model);
  back.bias_relevance += BiasShare(back, weights.out_proj_bias, dh, d_model, d_model);
  kernels::LinearTransposed(pool, {dh, tokens, d_model, d_model}, weights.out_proj, false,
                            {gradient.gated.data(), tokens, d_inner, d_inner});
  BackThroughMixed(back);
  BackThroughScans(back);
  back.bias_relevance += BiasShare(back, weights.in_proj_bias, gradient.in.data(), wide, wide);
  kernels::LinearTransposed(pool, {gradient.in.data(), tokens, wide, wide}, weights.in_proj, false,
                            {gradient.u.data(), tokens, d_model, d_model});
  kernels::RmsNormBackward(pool, stream, weights.norm, config.norm_eps, tokens, d_model,
                           gradient.u.data(), back.frozen(), dh);
  return back.bias_relevance;
}

int64_t LayerGradientBytes(const ModelConfig& config, int64_t tokens, int threads,
                           BackwardRule rule) {
  const int64_t d_inner = config.d_inner, wide = config.in_proj_rows();
  const bool both = config.directions() == 2, frozen = rule == BackwardRule::kRelevance;
  int64_t a_token = 2 * d_inner + config.conv_channels() + wide + config.d_model;
  if (both) a_token += d_inner + wide;
  if (!frozen) a_token += config.maps() + config.selective_width();
  int64_t scan = 0;
  if (!frozen) {
    scan = config.family == Family::kMamba2
               ? kernels::SsdBackwardBytes(tokens, config.heads, config.head_dim, config.groups,
                                           config.d_state, threads)
               : kernels::ScanBackwardBytes(tokens, d_inner, config.d_state, threads);
  }
  return 4 * tokens * a_token + scan;
}

}  // namespace mambascope::model
