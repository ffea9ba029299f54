#pragma once

#include <cstdint>
#include <vector>

#include "server/base/array.h"
#include "server/base/thread_pool.h"
#include "server/model/mamba_model.h"

namespace mambascope::model {

// The residual stream that enters each layer of one sequence, walked layer by layer in either
// direction, from a trace that recorded some of them. What lies between is computed again by the
// pass's own code (so with its bits) and kept until another stretch is needed: memory of about two
// square roots of the layers. Owned by one thread; borrows the trace.
class StreamWalk {
 public:
  // The first `tokens` tokens; the trace has streams. Of Vim and mean pooling all of them. A caller
  // who counted on fewer recomputed layers than the trace makes necessary gets them within his
  // calls: `planned_stride` is what he counted with, 0 the trace's.
  StreamWalk(const MambaModel& model, const SequenceTrace& trace, int64_t tokens,
             int32_t planned_stride = 0);

  // Whether `layer` (or `layers`: what leaves the last) is at hand; if not, computes one more layer
  // towards it. A whole walk over all layers, up or down, says false Recomputed() times.
  bool Prepare(ThreadPool& pool, int32_t layer);
  // [tokens, d_model], once Prepare said true; valid until the next Prepare.
  const float* Entering(int32_t layer) const;

  static int32_t Recomputed(const ModelConfig& config, int32_t stream_stride);
  // Upper bound of what is allocated here.
  static int64_t MemoryBytes(const ModelConfig& config, int64_t tokens, int32_t stream_stride);

 private:
  bool Advance(ThreadPool& pool, int32_t layer);

  const MambaModel& model_;
  const SequenceTrace& trace_;
  const int64_t tokens_;
  const bool one_a_call_;
  int32_t first_ = 0;                  // recorded layer that the stretch starts from
  int32_t reached_ = 0;                // last layer of it whose stream is known
  std::vector<Array<float>> stretch_;  // entering first_ + 1, first_ + 2, ..
  Workspace workspace_;
};

}  // namespace mambascope::model
