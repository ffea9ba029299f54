#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "mambascope/v1/explanation.pb.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"
#include "server/explain/target_row.h"

namespace mambascope::explain {

class UnifiedAttention;

// The identity y_i = sum_j alpha_ij x_j + D x_i of each scan, recomputed from what an explanation's
// maps are made of and held against what the forward pass recorded for the trace's checked
// channels. An explanation of another computation (other weights, other tokens, a faulty kernel)
// does not pass.
class Reconstruction {
 public:
  // Which kernel makes the maps that are compared: the one that makes the explanation's own.
  enum class Maps {
    kMean,     // MeanMap of one channel
    kHeaded,   // SsdMeanMap of one head
    kChannel,  // ChannelMaps
    kStates,   // StateMaps, summed
    kDecays,   // DecayMaps between Q and K, summed
  };

  // What AddMap's maps are made by.
  static Maps MapsOf(const LayerAttention& attention);

  explicit Reconstruction(const Subject& subject);

  // All rows of the layer that `attention` is open at. `scratch` [prefix, prefix].
  void CheckMaps(int32_t layer, Maps maps, LayerAttention& attention, float* scratch);
  // The target's row alone, by the adjoint scan; of spread rows (TargetRow) their mean, by
  // `weights` [prefix].
  void CheckRow(int32_t layer, const TargetRow& target, std::span<const float> weights,
                LayerAttention& attention);

  // Of scope MIXER the identity is out_proj's input = U x_in + constant: of all rows, or of the
  // target's by the weights of rows [prefix].
  void CheckUnifiedMaps(int32_t layer, UnifiedAttention& unified);
  void CheckUnifiedRow(int32_t layer, std::span<const float> weights, UnifiedAttention& unified);

  // Sets reconstruction, tolerance and within_tolerance.
  void Report(v1::Quality* quality) const;

  // What a layer's check computes.
  static Work MapsWork(const model::ModelConfig& config, int64_t prefix);
  static Work RowWork(const model::ModelConfig& config, int64_t prefix);
  // Upper bound of what is allocated, kernels included and `scratch` not.
  static int64_t MemoryBytes(const model::ModelConfig& config, int64_t prefix);

 private:
  // How many channels are compared in a layer.
  static int64_t RowChannels(int64_t d_inner);
  static int64_t MapChannels(int64_t d_inner);
  // The places among the trace's checked channels of those that are compared in a layer.
  std::vector<int64_t> Places(int32_t layer, int64_t count) const;
  float Skip(int32_t layer, int32_t direction, int64_t place) const;  // D
  int32_t MapOf(int64_t place) const;  // the channel's, or its head's
  std::vector<int32_t> ChannelsAt(std::span<const int64_t> places) const;
  // out_proj's input at a token, from what the trace recorded of the scans.
  double RecordedMixed(int32_t layer, int64_t token, int64_t tokens, int64_t place,
                       const UnifiedAttention& unified) const;
  struct Error {
    double difference = 0, largest = 0;  // over the compared entries
    void Add(double rebuilt, double recorded);
  };
  void CheckMapsOf(int32_t layer, int32_t direction, Maps maps, const std::vector<int64_t>& places,
                   LayerAttention& attention, float* scratch);
  void CheckRowOf(int32_t layer, int32_t direction, const TargetRow& target,
                  std::span<const float> weights, const std::vector<int64_t>& places,
                  LayerAttention& attention);
  // The worst of the layer's scans stands.
  void Note(int32_t layer, const Error& error);

  const Subject subject_;
  const int64_t d_inner_, checked_;
  int64_t channels_ = 0, rows_ = 0;
  std::map<int32_t, float> errors_;  // by layer
};

}  // namespace mambascope::explain
