#include "server/model/stream_walk.h"

#include <algorithm>

#include "server/base/check.h"
#include "server/model/mamba_block.h"

namespace mambascope::model {

StreamWalk::StreamWalk(const MambaModel& model, const SequenceTrace& trace, int64_t tokens,
                       int32_t planned_stride)
    : model_(model),
      trace_(trace),
      tokens_(tokens),
      one_a_call_(planned_stride == 0 || planned_stride >= trace.stream_stride) {
  MS_CHECK(trace.stream_stride > 0 && tokens <= trace.tokens);
  stretch_.resize(trace.stream_stride - 1);
}

bool StreamWalk::Prepare(ThreadPool& pool, int32_t layer) {
  while (!Advance(pool, layer)) {
    if (one_a_call_) return false;
  }
  return true;
}

bool StreamWalk::Advance(ThreadPool& pool, int32_t layer) {
  if (trace_.stream(layer) != nullptr) return true;
  const int32_t first = layer / trace_.stream_stride * trace_.stream_stride;
  if (first != first_) reached_ = first_ = first;
  if (layer <= reached_) return true;

  const ModelConfig& config = model_.config();
  RecurrentState state(config);
  Piece piece;
  piece.state = &state;
  piece.embeddings = {Entering(reached_), static_cast<size_t>(tokens_ * config.d_model)};
  const int32_t seq_start[] = {0, static_cast<int32_t>(tokens_)};
  const PackedSequences packed{std::span(&piece, 1), seq_start, false};
  ReserveBlock(config, packed, workspace_);
  std::copy(piece.embeddings.begin(), piece.embeddings.end(), workspace_.h.data());
  RunBlock(pool, config, model_.weights().layer(reached_), reached_, packed, workspace_);
  Array<float>& next = stretch_[reached_ - first_];
  next.Reserve(tokens_ * config.d_model);
  std::copy_n(workspace_.h.data(), tokens_ * config.d_model, next.data());
  ++reached_;
  return false;
}

const float* StreamWalk::Entering(int32_t layer) const {
  const float* recorded = trace_.stream(layer);
  if (recorded != nullptr) return recorded;
  MS_CHECK(layer > first_ && layer <= reached_);
  return stretch_[layer - first_ - 1].data();
}

int32_t StreamWalk::Recomputed(const ModelConfig& config, int32_t stream_stride) {
  return config.layers - (config.layers + stream_stride - 1) / stream_stride;
}

int64_t StreamWalk::MemoryBytes(const ModelConfig& config, int64_t tokens, int32_t stream_stride) {
  if (stream_stride <= 1) return 0;
  const int64_t kept = int64_t{stream_stride - 1} * config.d_model;
  return 4 * tokens * (kept + BlockFloats(config, /*traced=*/false)) +
         RecurrentState::Bytes(config);
}

}  // namespace mambascope::model
