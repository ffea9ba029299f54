#include "server/explain/state_scan.h"

#include <algorithm>

#include "server/kernels/gemm.h"
#include "server/kernels/selective_scan.h"
#include "server/kernels/ssd_scan.h"

namespace mambascope::explain {
namespace {

constexpr int64_t kSliceWork = int64_t{1} << 24;  // token x channel x state steps
constexpr int64_t kPieceTokens = 256;             // bounds what a call of the kernels writes

}  // namespace

StateScan::StateScan(const model::ModelConfig& config, int32_t direction)
    : config_(config), direction_(direction) {}

int64_t StateScan::MemoryBytes(const model::ModelConfig& config) {
  return 4 * config.d_inner * (int64_t{config.d_state} + 2 * kPieceTokens);
}

int64_t StateScan::SliceTokens(const model::ModelConfig& config) {
  return std::max<int64_t>(kSliceWork / (int64_t{config.d_inner} * config.d_state), 1);
}

void StateScan::Begin(const Subject& subject, int32_t layer,
                      const model::LayerActivations& activations) {
  subject_ = &subject;
  activations_ = &activations;
  layer_ = layer;
  reached_ = 0;
  state_.Reserve(int64_t{config_.d_inner} * config_.d_state);
  std::fill(state_.begin(), state_.end(), 0.0f);
  gated_.Reserve(kPieceTokens * config_.d_inner);
}

void StateScan::Advance(int64_t tokens) {
  while (reached_ < tokens) {
    const int64_t end = std::min(reached_ + kPieceTokens, tokens);
    if (config_.family == model::Family::kMamba2) {
      RunHeaded(reached_, end);
    } else {
      RunSelective(reached_, end);
    }
    reached_ = end;
  }
}

void StateScan::RunSelective(int64_t begin, int64_t end) {
  const model::BranchWeights& branch =
      subject_->model->weights().layer(layer_).branches[direction_];
  const int64_t tokens = end - begin, d_inner = config_.d_inner, width = config_.selective_width();
  const float* selective =
      subject_->trace->layer(layer_, direction_).selective.data() + begin * width;
  dt_.Reserve(kPieceTokens * d_inner);
  kernels::Linear(*subject_->pool, {selective, tokens, config_.dt_rank, width}, branch.dt_proj,
                  branch.dt_bias, {dt_.data(), tokens, d_inner, d_inner});
  const model::InProjLayout layout = model::InProjLayoutOf(config_);
  const Array<float>& in = direction_ == 0 ? activations_->in : activations_->flipped_in;
  const int32_t seq_start[] = {0, static_cast<int32_t>(tokens)};
  float* const states[] = {state_.data()};
  kernels::ScanInputs scan;
  scan.d_inner = d_inner;
  scan.d_state = config_.d_state;
  scan.x = activations_->branches[direction_].x.data() + begin * d_inner;
  scan.dt = dt_.data();
  scan.z = in.data() + begin * layout.stride + layout.z;
  scan.z_stride = layout.stride;
  scan.A = branch.A;
  scan.B = selective + config_.dt_rank;
  scan.C = scan.B + config_.d_state;
  scan.bc_stride = width;
  scan.D = branch.D;
  scan.seq_start = seq_start;
  kernels::SelectiveScan(*subject_->pool, scan, {gated_.data(), nullptr, states});
}

void StateScan::RunHeaded(int64_t begin, int64_t end) {
  const model::BranchWeights& branch = subject_->model->weights().layer(layer_).branches[0];
  const model::InProjLayout layout = model::InProjLayoutOf(config_);
  const float* in = activations_->in.data() + begin * layout.stride;
  const int32_t seq_start[] = {0, static_cast<int32_t>(end - begin)};
  float* const states[] = {state_.data()};
  kernels::SsdInputs scan;
  scan.heads = config_.heads;
  scan.head_dim = config_.head_dim;
  scan.groups = config_.groups;
  scan.d_state = config_.d_state;
  scan.x = activations_->branches[0].x.data() + begin * config_.conv_channels();
  scan.B = scan.x + config_.d_inner;
  scan.C = scan.B + int64_t{config_.groups} * config_.d_state;
  scan.xbc_stride = config_.conv_channels();
  scan.dt = in + layout.dt;
  scan.dt_stride = layout.stride;
  scan.dt_bias = branch.dt_bias;
  scan.delta_min = config_.delta_min;
  scan.delta_max = config_.delta_max;
  scan.A = branch.A;
  scan.D = branch.D;
  scan.z = in + layout.z;
  scan.z_stride = layout.stride;
  scan.seq_start = seq_start;
  kernels::SsdScan(*subject_->pool, scan, {gated_.data(), nullptr, states});
}

float StateScan::At(int32_t channel, int32_t state) const {
  if (config_.family != model::Family::kMamba2) {
    return state_[int64_t{state} * config_.d_inner + channel];
  }
  const int64_t head = channel / config_.head_dim, in_head = channel % config_.head_dim;
  return state_[(head * config_.d_state + state) * config_.head_dim + in_head];
}

}  // namespace mambascope::explain
