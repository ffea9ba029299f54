#include "server/explain/hidden_attention_setup.h"

#include <algorithm>

namespace mambascope::explain {
namespace {

// Single maps are many and cheap: a slice brings this many numbers of them, or one map.
constexpr int64_t kSliceFloats = int64_t{1} << 20;

}  // namespace

bool IsFactor(v1::Part part) {
  return part == v1::PART_STATE || part == v1::PART_Q || part == v1::PART_K || part == v1::PART_H;
}

bool IsPerToken(v1::Part part) { return part == v1::PART_Q || part == v1::PART_K; }

model::ModelConfig ByChannel(const model::ModelConfig& config) {
  model::ModelConfig by_channel = config;
  if (config.family == model::Family::kMamba2) {
    by_channel.heads = config.d_inner;
    by_channel.head_dim = 1;
  }
  return by_channel;
}

HiddenAttentionSetup::HiddenAttentionSetup(const v1::Explanation& explanation,
                                           const model::ModelConfig& model, int64_t length,
                                           const TargetRow& row)
    : config(model), tokens(length), target(row) {
  const v1::HiddenAttention& options = explanation.hidden_attention();
  layers = LayersOf(options.layers(), config);
  scope = options.scope() == v1::HiddenAttention::SCOPE_UNSPECIFIED ? v1::HiddenAttention::SCOPE_SSM
                                                                    : options.scope();
  direction = options.direction() == v1::HiddenAttention::DIRECTION_UNSPECIFIED
                  ? v1::HiddenAttention::DIRECTION_BOTH
                  : options.direction();
  part = options.part() == v1::PART_UNSPECIFIED ? v1::PART_ALPHA : options.part();
  all_rows = options.rows() != v1::ROWS_TARGET;
  prefix = all_rows ? tokens : target.prefix;
  reduction =
      MakeReduction(IsFactor(part) ? v1::REDUCTION_CHANNELS : options.reduction(),
                    options.channels(), options.top_k(), mixer() ? ByChannel(config) : config);
  states.assign(options.states().begin(), options.states().end());
  if (states.empty()) states = Indices(config.d_state);
  kind = IsPerToken(part)                          ? Kind::kPerToken
         : IsFactor(part)                          ? Kind::kInner
         : reduction.how == v1::REDUCTION_CHANNELS ? Kind::kChannels
                                                   : Kind::kReduced;
}

LayerAttention HiddenAttentionSetup::Attention() const {
  const bool maps = all_rows && kind == Kind::kReduced;
  return LayerAttention(reduction, maps ? LayerAttention::Want::kMap : LayerAttention::Want::kRow,
                        part == v1::PART_RELU, config, tokens, prefix, target.spread, direction);
}

int64_t HiddenAttentionSetup::units() const {
  if (kind == Kind::kPerToken) return tokens;
  const auto count = static_cast<int64_t>(channels().size());
  return kind == Kind::kInner ? count * static_cast<int64_t>(states.size()) : count;
}

int64_t HiddenAttentionSetup::unit_floats() const {
  if (kind == Kind::kPerToken) return static_cast<int64_t>(channels().size()) * config.d_state;
  return all_rows ? tokens * tokens : tokens;
}

int64_t HiddenAttentionSetup::units_per_step() const {
  return std::clamp<int64_t>(kSliceFloats / unit_floats(), 1, units());
}

int64_t HiddenAttentionSetup::steps_per_layer(const LayerAttention& attention) const {
  if (kind == Kind::kReduced) return attention.rank_pieces() + attention.pieces();
  return (units() + units_per_step() - 1) / units_per_step();
}

}  // namespace mambascope::explain
