#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "server/explain/subject.h"
#include "server/model/mamba_model.h"

namespace mambascope::explain {

// A forward pass over other embeddings in place of the subject's, layer by layer, for its streams
// and f. Owned and stepped by one thread.
class EmbeddedPass {
 public:
  // Of the tokens that the target can have read; streams are recorded every `stream_stride` layers,
  // for 0 none.
  EmbeddedPass(const Subject& subject, int32_t stream_stride);

  // Begins with `embeddings` [tokens, d_model], borrowed until it is done.
  absl::Status Begin(std::span<const float> embeddings);
  // One layer; the last one finds f. Layers() calls after Begin.
  absl::Status Step();
  bool done() const { return layer_ == subject_.model->config().layers; }

  const model::SequenceTrace& trace() const { return *trace_; }  // once done
  double value() const { return value_; }                        // f, once done

  static int64_t MemoryBytes(const model::ModelConfig& config, int64_t tokens,
                             int32_t stream_stride);

 private:
  const Subject subject_;  // its tokens are those that the target can have read
  const int32_t stream_stride_;
  std::vector<int32_t> rows_;
  std::optional<model::SequenceTrace> trace_;
  std::optional<model::RecurrentState> state_;
  model::Piece piece_;
  model::Workspace workspace_;
  std::vector<float> logits_;
  int32_t layer_ = 0;
  double value_ = 0;
};

}  // namespace mambascope::explain
