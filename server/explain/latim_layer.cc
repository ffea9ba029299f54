#include "server/explain/latim_layer.h"

#include <algorithm>
#include <cmath>

#include "server/base/check.h"
#include "server/explain/method.h"
#include "server/kernels/row_block.h"
#include "server/kernels/tap_rows.h"

namespace mambascope::explain {
namespace {

using kernels::Activation;

// A slice's multiply-adds of the rows' recurrences, about 20 ms; an exponential counts as six.
constexpr int64_t kScanWork = int64_t{1} << 28;
constexpr int64_t kExponential = 6;
constexpr int64_t kRowFloats = int64_t{1} << 24;  // of a block's rows: 64 MiB

// f of the parts that the convolution's output is taken apart into.
Activation PartActivation(v1::Latim::Activation activation) {
  if (activation == v1::Latim::ACTIVATION_SILU) return Activation::kSilu;
  if (activation == v1::Latim::ACTIVATION_RELU) return Activation::kRelu;
  return Activation::kIdentity;  // of GATE the slope stands in the row
}

float Apply(Activation f, float v) {
  if (f == Activation::kSilu) return static_cast<float>(v / (1 + std::exp(-double{v})));
  return f == Activation::kRelu ? std::max(v, 0.0f) : v;
}

}  // namespace

v1::Latim::Activation ActivationOf(v1::Latim::Activation activation) {
  return activation == v1::Latim::ACTIVATION_UNSPECIFIED ? v1::Latim::ACTIVATION_GATE : activation;
}

LatimLayer::LatimLayer(const model::ModelConfig& config, v1::Latim::Activation activation,
                       int64_t tokens)
    : config_(config), activation_(ActivationOf(activation)), tokens_(tokens) {}

int64_t LatimLayer::BlockRows(int64_t rows) const {
  const int64_t a_row = tokens_ * config_.maps() * config_.d_state;
  const int64_t most =
      std::min(kScanWork / a_row - kExponential, kRowFloats / (tokens_ * config_.d_inner));
  return std::clamp<int64_t>(most, 1, std::min(rows, kernels::kMostRowsInBlock));
}

int64_t LatimLayer::MemoryBytes(int64_t rows) const {
  const int64_t d_inner = config_.d_inner, block = BlockRows(rows);
  int64_t branch = (config_.d_conv + 1) * d_inner + block * (tokens_ + 1) * d_inner;
  if (config_.groups > 1) branch += (tokens_ + config_.d_state) * config_.maps();
  int64_t floats = config_.directions() * branch + (2 * block + 1) * d_inner;
  if (config_.maps() / config_.groups < d_inner) {
    floats += block * tokens_ * (config_.maps() / config_.groups);
  }
  floats += 64 * tokens_ + kPlannedThreads * 1024 * config_.d_state;
  return 4 * floats + model::LayerActivationsBytes(config_, tokens_);
}

void LatimLayer::Open(const Subject& subject, int32_t layer, const float* stream) {
  pool_ = subject.pool;
  weights_ = &subject.model->weights().layer(layer);
  model::RunLayerOnce(*pool_, *subject.model, layer, stream, tokens_, model::LayerParts::kAll,
                      activations_);
  for (int32_t direction = 0; direction < config_.directions(); ++direction) {
    branches_[direction].scan = model::ScanOf(*subject.model, layer, direction, activations_);
    OpenBranch(direction);
  }
}

void LatimLayer::OpenBranch(int32_t direction) {
  const model::BranchWeights& weights = weights_->branches[direction];
  Branch& branch = branches_[direction];
  const int64_t d_inner = config_.d_inner, taps = config_.d_conv;
  const Activation f = PartActivation(activation_);
  branch.weight.resize(taps * d_inner);
  branch.bias.assign(d_inner, 0);
  for (int64_t d = 0; d < d_inner; ++d) {
    for (int64_t m = 0; m < taps; ++m) {
      branch.weight[m * d_inner + d] = weights.conv1d[d * taps + taps - 1 - m];
    }
    if (weights.conv1d_bias != nullptr) branch.bias[d] = Apply(f, weights.conv1d_bias[d]);
  }
  if (activation_ == v1::Latim::ACTIVATION_GATE) {
    // Nobody else reads c: its slope takes its place.
    float* const c = activations_.branches[direction].c.data();
    const int64_t stride = config_.conv_channels();
    pool_->Split(tokens_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        kernels::ActivationSlope(config_.conv_activation,
                                 {c + k * stride, static_cast<size_t>(d_inner)});
      }
    });
  }
  const int64_t groups = config_.groups, maps = config_.maps(), heads = maps / groups;
  if (groups == 1) return;
  branch.delta.Reserve(tokens_ * maps);
  branch.A.Reserve(config_.d_state * maps);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < tokens_; ++i) {
      std::copy_n(branch.scan.delta + i * maps + g * heads, heads,
                  branch.delta.data() + (g * tokens_ + i) * heads);
    }
    for (int64_t n = 0; n < config_.d_state; ++n) {
      std::copy_n(branch.scan.A + n * maps + g * heads, heads,
                  branch.A.data() + (g * config_.d_state + n) * heads);
    }
  }
}

kernels::ScanParameters LatimLayer::ScanOfGroup(const Branch& branch, int64_t group) const {
  kernels::ScanParameters scan = branch.scan;
  if (config_.groups == 1) return scan;
  scan.d_inner = config_.maps() / config_.groups;
  scan.delta = branch.delta.data() + group * tokens_ * scan.d_inner;
  scan.A = branch.A.data() + group * config_.d_state * scan.d_inner;
  scan.B += group * config_.d_state;
  scan.C += group * config_.d_state;
  return scan;
}

std::vector<float> LatimLayer::ScaleOf(int64_t i, float weight) const {
  const int64_t d_inner = config_.d_inner;
  const model::InProjLayout layout = model::InProjLayoutOf(config_);
  const float* const z = activations_.in.data() + i * layout.stride + layout.z;
  std::vector<float> scale(d_inner);
  for (int64_t d = 0; d < d_inner; ++d) {
    scale[d] = weight * Apply(Activation::kSilu, z[d]);
    if (config_.family == model::Family::kMamba2) {
      const int64_t group = d / (d_inner / config_.groups);
      scale[d] *= weights_->mixer_norm[d] * activations_.norm_scale[i * config_.groups + group];
    }
    if (config_.family == model::Family::kVim && config_.vision.divide_out) scale[d] *= 0.5f;
  }
  return scale;
}

void LatimLayer::OpenRows(int64_t first, int64_t count, const float* weights) {
  std::vector<float> scales;
  for (int64_t r = 0; r < count; ++r) {
    const std::vector<float> scale = ScaleOf(first + r, weights == nullptr ? 1.0f : weights[r]);
    scales.insert(scales.end(), scale.begin(), scale.end());
  }
  // In a backward scan's own order the same rows run from the last to the first.
  branches_[0].first = first;
  branches_[1].first = tokens_ - first - count;
  for (int32_t direction = 0; direction < config_.directions(); ++direction) {
    Branch& branch = branches_[direction];
    branch.row_floats = (branch.first + count) * config_.d_inner;
    branch.rows.Reserve(count * tokens_ * config_.d_inner);  // at once: blocks read ever more
    branch.sums.Reserve(count * config_.d_inner);
    for (int64_t g = 0; g < config_.groups; ++g) {
      OpenGroup(direction, g, count, [&](int64_t r) {
        return scales.data() + (direction == 0 ? r : count - 1 - r) * config_.d_inner;
      });
    }
  }
}

void LatimLayer::OpenGroup(int32_t direction, int64_t group, int64_t count,
                           absl::FunctionRef<const float*(int64_t)> scale_of) {
  Branch& branch = branches_[direction];
  const model::BranchWeights& weights = weights_->branches[direction];
  kernels::ScanParameters scan = ScanOfGroup(branch, group);
  const int64_t maps = scan.d_inner, d_inner = config_.d_inner;
  const int64_t per_map = config_.channels_per_map(), channel = group * maps * per_map;
  // In place where every channel has a map of its own.
  const bool in_place = maps == d_inner;
  const int64_t row_tokens = branch.first + count;
  if (!in_place) alpha_.Reserve(count * tokens_ * maps);
  float* const alpha = in_place ? branch.rows.data() : alpha_.data();
  scan.tokens = row_tokens;
  kernels::TargetRowBlock(*pool_, scan, branch.first, count, alpha);
  for (int64_t r = 0; r < count; ++r) {
    kernels::RowFold fold;
    fold.alpha = alpha + r * row_tokens * maps;
    fold.maps = maps;
    fold.channels_per_map = per_map;
    fold.target = branch.first + r;
    fold.skip = weights.D + group * maps;
    fold.scale = scale_of(r) + channel;
    if (activation_ == v1::Latim::ACTIVATION_GATE) {
      fold.slope = activations_.branches[direction].c.data() + channel;
      fold.slope_stride = config_.conv_channels();
    }
    fold.row = branch.rows.data() + r * branch.row_floats + channel;
    fold.row_stride = d_inner;
    fold.sums = branch.sums.data() + r * d_inner + channel;
    pool_->Split(maps, 16, [&](int64_t begin, int64_t end) { kernels::FoldRow(fold, begin, end); });
  }
}

void LatimLayer::Inputs(int64_t i, int64_t begin, int64_t end, bool accumulate, float* out) const {
  const int64_t d_inner = config_.d_inner;
  MS_CHECK(0 <= begin && begin < end && end <= ReadTo(i));
  if (both_ways() && !accumulate) std::fill_n(out, (end - begin) * d_inner, 0.0f);
  for (int32_t direction = 0; direction < config_.directions(); ++direction) {
    const Branch& branch = branches_[direction];
    const model::InProjLayout layout = model::InProjLayoutOf(config_);
    kernels::TapRow in;
    in.target = direction == 0 ? i : tokens_ - 1 - i;
    in.row = branch.rows.data() + (in.target - branch.first) * branch.row_floats;
    in.x_in = (direction == 0 ? activations_.in : activations_.flipped_in).data() + layout.x_in;
    in.x_stride = layout.stride;
    in.weight = branch.weight.data();
    in.channels = d_inner;
    in.taps = config_.d_conv;
    in.f = PartActivation(activation_);
    const bool adds = accumulate || both_ways();
    if (direction == 0) {
      kernels::TapRows(in, begin, std::min(end, i + 1), adds, out, d_inner);
    } else {
      kernels::TapRows(in, tokens_ - end, tokens_ - std::max(begin, i), adds,
                       out + (end - 1 - begin) * d_inner, -d_inner);
    }
  }
}

void LatimLayer::Constant(int64_t i, bool accumulate, float* out) const {
  if (!accumulate) std::fill_n(out, config_.d_inner, 0.0f);
  for (int32_t direction = 0; direction < config_.directions(); ++direction) {
    const Branch& branch = branches_[direction];
    const int64_t target = direction == 0 ? i : tokens_ - 1 - i;
    const float* const sums = branch.sums.data() + (target - branch.first) * config_.d_inner;
    for (int64_t d = 0; d < config_.d_inner; ++d) out[d] += branch.bias[d] * sums[d];
  }
}

}  // namespace mambascope::explain
