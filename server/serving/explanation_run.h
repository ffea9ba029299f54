#pragma once

#include <memory>
#include <span>
#include <vector>

#include "server/base/clock.h"
#include "server/base/thread_pool.h"
#include "server/explain/event_sink.h"
#include "server/explain/gradient_walk.h"
#include "server/explain/method.h"
#include "server/explain/tensor_writer.h"
#include "server/model/layer_trace.h"
#include "server/observe/metrics.h"
#include "server/serving/call.h"

namespace mambascope::serving {

// The explanations of one call, one after the other, slice by slice, from the trace that its
// forward pass left. One that fails says so in its own `explanation_finished`; the others go on.
// Owned by the executor's thread. Borrows everything it is given.
class ExplanationRun {
 public:
  ExplanationRun(Call* call, explain::EventSink* sink, ThreadPool* pool, observe::Metrics* metrics,
                 const Clock* clock);

  // The logits [vocabulary] of one prompt position that some target names.
  void ResolveTargets(int32_t position, std::span<const float> logits);

  bool done() const { return current_ >= call_->explanations.size(); }
  // Runs the next slice; `trace` holds the whole prompt.
  void Step(const model::SequenceTrace& trace);

 private:
  void Begin(const model::SequenceTrace& trace);
  explain::Subject SubjectOf(const PlannedExplanation& planned,
                             const model::SequenceTrace& trace) const;
  void Finish(const absl::Status& status);
  void Send(v1::PredictEvent event);

  Call* call_;
  explain::EventSink* sink_;
  ThreadPool* pool_;
  observe::Metrics* metrics_;
  const Clock* clock_;

  std::vector<v1::ResolvedTarget> targets_;  // one for each explanation
  mutable explain::GradientCache gradients_;
  size_t current_ = 0;
  std::unique_ptr<explain::Explaining> explaining_;  // null: the current one has not begun
  std::unique_ptr<explain::TensorWriter> writer_;
  int32_t slices_done_ = 0;
  absl::Duration compute_;
};

}  // namespace mambascope::serving
