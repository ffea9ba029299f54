#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "server/model/config.h"
#include "server/model/cuda/pass_workspace.h"
#include "server/model/weights.h"

namespace mambascope::model::cuda {

// A pass's pieces as the device knows them; all pointers are of the device.
struct SentPieces {
  int64_t sequences = 0, tokens = 0;
  const int32_t* seq_start = nullptr;    // [sequences + 1]
  const int32_t* sequence_of = nullptr;  // [tokens]
  // [layers, directions, sequences] pointers to the states.
  float* const* conv_states = nullptr;
  float* const* ssm_states = nullptr;
  const int32_t* traced = nullptr;            // rows of pieces with a trace, ascending
  const int32_t* checked_channels = nullptr;  // of the traces
};

// Where PassWorkspace::records holds what the traces get: of each scan (layers x directions) the
// numbers of all `count` traced rows, in three arrays.
struct RecordLayout {
  int64_t count = 0, width = 0, checked = 0, scans = 0;

  int64_t size() const { return count * (width + 2 * checked); }  // of a scan
  int64_t size_all() const { return scans * size(); }
  int64_t selective(int64_t scan) const { return scan * size(); }  // [count, width]
  int64_t x_checked(int64_t scan) const { return selective(scan) + count * width; }
  int64_t y_checked(int64_t scan) const { return x_checked(scan) + count * checked; }
};

// What stands between in_proj and out_proj, as model/mixer.h does on the CPU: from workspace.xz to
// workspace.gated on the workspace's stream. Advances the states and fills workspace.records.
struct MixerPass {
  const ModelConfig& config;
  const LayerWeights& weights;  // of the device
  int32_t layer;
  const SentPieces& pieces;
  const RecordLayout& record;
  PassWorkspace& workspace;
};
absl::Status RunMixer(const MixerPass& pass);

}  // namespace mambascope::model::cuda
