#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "server/explain/layer_attention.h"
#include "server/explain/options.h"
#include "server/explain/state_scan.h"
#include "server/explain/stream_steps.h"
#include "server/explain/target_row.h"

namespace mambascope::explain {

// The kinds of parameters by what they belong to.
inline const char* NameOf(int kind) {
  constexpr const char* kNames[] = {"", "delta", "B", "C", "decay", "gate", "state"};
  return kNames[kind];
}
inline bool OfMaps(int kind) {
  return kind == v1::Parameters::KIND_DELTA || kind == v1::Parameters::KIND_DECAY;
}
inline bool OfGroups(int kind) {
  return kind == v1::Parameters::KIND_B || kind == v1::Parameters::KIND_C;
}
inline bool NeedsStream(int kind) {
  return kind == v1::Parameters::KIND_GATE || kind == v1::Parameters::KIND_STATE;
}

// What the options come to for a model and an input.
struct ParametersSetup {
  ParametersSetup(const v1::Explanation& explanation, const model::ModelConfig& model,
                  int64_t length, const TargetRow& row)
      : config(model), tokens(length), target(row) {
    const v1::Parameters& options = explanation.parameters();
    kinds.assign(options.kinds().begin(), options.kinds().end());
    layers = LayersOf(options.layers(), config);
    asked.assign(options.positions().begin(), options.positions().end());
    channels.assign(options.channels().begin(), options.channels().end());
    direction = options.direction() == v1::HiddenAttention::DIRECTION_BACKWARD ? 1 : 0;
    for (const int kind : kinds) {
      streams = streams || NeedsStream(kind);
      for (const int32_t position : Positions(kind)) {
        prefix = std::max<int64_t>(prefix, position + 1);
      }
    }
    prefix = config.directions() == 2 ? tokens : std::max(prefix, target.prefix);
  }

  std::vector<int32_t> Positions(int kind) const {
    if (!asked.empty()) return asked;
    if (kind == v1::Parameters::KIND_STATE) return {static_cast<int32_t>(target.position)};
    return Indices(tokens);
  }
  std::vector<int32_t> Channels(int kind) const {
    if (OfGroups(kind)) return Indices(config.groups);
    if (!channels.empty()) return channels;
    return Indices(OfMaps(kind) ? config.maps() : config.d_inner);
  }
  bool ByState(int kind) const {
    const bool decays =
        kind == v1::Parameters::KIND_DECAY && config.family != model::Family::kMamba2;
    return OfGroups(kind) || kind == v1::Parameters::KIND_STATE || decays;
  }
  // Numbers of one position and channel.
  int64_t States(int kind) const { return ByState(kind) ? config.d_state : 1; }
  int64_t RowFloats(int kind) const {
    return static_cast<int64_t>(Channels(kind).size()) * States(kind);
  }
  int64_t RowsPerStep(int kind) const {
    return std::max<int64_t>((int64_t{1} << 20) / RowFloats(kind), 1);
  }
  // Where a token stands in the scan's own order.
  int64_t Place(int64_t token) const { return direction == 0 ? token : tokens - 1 - token; }
  // The state's positions as the scan meets them, and where each stands among those asked for.
  std::vector<std::pair<int64_t, int64_t>> Stops() const {
    std::vector<std::pair<int64_t, int64_t>> stops;
    for (const int32_t position : Positions(v1::Parameters::KIND_STATE)) {
      stops.emplace_back(Place(position), static_cast<int64_t>(stops.size()));
    }
    std::sort(stops.begin(), stops.end());
    return stops;
  }
  int64_t Steps(int kind) const {
    if (kind == v1::Parameters::KIND_STATE) return static_cast<int64_t>(StateSteps().size());
    const auto rows = static_cast<int64_t>(Positions(kind).size());
    return (rows + RowsPerStep(kind) - 1) / RowsPerStep(kind);
  }
  // Tokens that the scan has read after each step.
  std::vector<int64_t> StateSteps() const {
    std::vector<int64_t> steps;
    const int64_t most = StateScan::SliceTokens(config),
                  rows = RowsPerStep(v1::Parameters::KIND_STATE);
    int64_t reached = 0, stops = 0;
    for (const auto& [place, index] : Stops()) {
      for (; place + 1 - reached > most; stops = 0) steps.push_back(reached += most);
      if (++stops < rows) continue;
      steps.push_back(reached = place + 1);
      stops = 0;
    }
    const int64_t last = Stops().back().first + 1;
    if (steps.empty() || steps.back() < last) steps.push_back(last);
    return steps;
  }
  int64_t StepsPerLayer() const {
    int64_t steps = 1;
    for (const int kind : kinds) steps += Steps(kind);
    return steps;
  }
  std::vector<int32_t> Preparing() const {
    if (!streams) return std::vector<int32_t>(layers.size(), 0);
    return StreamSteps(layers, model::SequenceTrace::StreamStride(config, tokens));
  }
  LayerAttention Attention() const {
    const v1::HiddenAttention::Direction one = direction == 1
                                                   ? v1::HiddenAttention::DIRECTION_BACKWARD
                                                   : v1::HiddenAttention::DIRECTION_FORWARD;
    return LayerAttention({}, LayerAttention::Want::kRow, /*relu=*/false, config, tokens, prefix,
                          target.spread, one);
  }

  const model::ModelConfig& config;
  int64_t tokens;
  TargetRow target;
  std::vector<int> kinds;
  std::vector<int32_t> layers, asked, channels;
  int32_t direction = 0;
  bool streams = false;
  int64_t prefix = 0;  // tokens that are read
};

}  // namespace mambascope::explain
