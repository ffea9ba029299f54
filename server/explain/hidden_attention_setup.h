#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/explain/target_row.h"

namespace mambascope::explain {

// What the options of hidden_attention come to for a model and an input.
struct HiddenAttentionSetup {
  // How the layer's numbers are made.
  enum class Kind {
    kReduced,   // one map or row
    kChannels,  // maps of channels
    kInner,     // maps of channels and states: STATE and H
    kPerToken,  // Q and K
  };
  static constexpr absl::string_view kName = "hidden_attention";

  HiddenAttentionSetup(const v1::Explanation& explanation, const model::ModelConfig& config,
                       int64_t tokens, const TargetRow& target);

  const std::vector<int32_t>& channels() const { return reduction.channels; }
  bool mixer() const { return scope == v1::HiddenAttention::SCOPE_MIXER; }
  bool by_map() const { return all_rows && kind != Kind::kPerToken; }

  // ---- of scope SSM ----
  LayerAttention Attention() const;
  // Maps, rows or blocks of tokens of one layer, and how many of them a slice makes.
  int64_t units() const;
  int64_t unit_floats() const;
  int64_t units_per_step() const;
  int64_t steps_per_layer(const LayerAttention& attention) const;

  const model::ModelConfig& config;
  int64_t tokens;
  TargetRow target;
  int64_t prefix;  // tokens that are computed
  v1::HiddenAttention::Scope scope;
  v1::HiddenAttention::Direction direction;
  std::vector<int32_t> layers, states;
  v1::Part part;
  bool all_rows;
  ChannelReduction reduction;  // of MIXER its channels are those of d_inner
  Kind kind;
};

// One map or one value for each token and channel, not for each pair of tokens.
bool IsFactor(v1::Part part);
bool IsPerToken(v1::Part part);

// A model whose maps are one for each channel of d_inner, as those of scope MIXER are: its
// ModelConfig::maps() bounds channels and top_k.
model::ModelConfig ByChannel(const model::ModelConfig& config);

// The two scopes, and what they add to a plan whose tensors are known.
std::unique_ptr<Explaining> ExplainScan(const v1::Explanation& options, const Subject& subject);
void PlanScan(const HiddenAttentionSetup& setup, Plan* plan);
std::unique_ptr<Explaining> ExplainMixer(const v1::Explanation& options, const Subject& subject);
void PlanMixer(const HiddenAttentionSetup& setup, Plan* plan);

}  // namespace mambascope::explain
