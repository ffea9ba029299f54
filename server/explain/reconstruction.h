#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "mambascope/v1/explanation.pb.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"

namespace mambascope::explain {

// The identity y_i = sum_j alpha_ij x_j + D x_i, recomputed from what an explanation's maps are
// made of and held against what the forward pass recorded for the trace's checked channels. An
// explanation of another computation (other weights, other tokens, a faulty kernel) does not pass.
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
  // The target's row alone, by the adjoint scan.
  void CheckRow(int32_t layer, int64_t target, LayerAttention& attention);

  // Sets reconstruction, tolerance and within_tolerance.
  void Report(v1::Quality* quality) const;

  // Upper bound of what is allocated, kernels included and `scratch` not.
  static int64_t MemoryBytes(const model::ModelConfig& config, int64_t prefix);

 private:
  // The places among the trace's checked channels of those that are compared in a layer.
  std::vector<int64_t> Places(int32_t layer, int64_t count) const;
  float Skip(int32_t layer, int64_t place) const;  // D
  int32_t MapOf(int64_t place) const;              // the channel's, or its head's
  struct Error {
    double difference = 0, largest = 0;  // over the compared entries
    void Add(double rebuilt, double recorded);
  };
  void Note(int32_t layer, const Error& error, int64_t channels, int64_t rows);

  const Subject subject_;
  const int64_t d_inner_, checked_;
  int64_t channels_ = 0, rows_ = 0;
  std::map<int32_t, float> errors_;  // by layer
};

}  // namespace mambascope::explain
