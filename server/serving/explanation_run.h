#pragma once

#include <memory>
#include <span>
#include <vector>

#include "server/base/clock.h"
#include "server/base/thread_pool.h"
#include "server/explain/agreement.h"
#include "server/explain/event_sink.h"
#include "server/explain/faithfulness.h"
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

  // The logits [outputs] of one prompt position that some target names.
  void NoteLogits(int32_t position, std::span<const float> logits);
  // The generated token of an index, with the logits that it was chosen from.
  void NoteGenerated(int32_t index, int32_t token, std::span<const float> logits);

  // What stays of an explanation until the call's end: its scores and their ranks.
  static int64_t KeptBytes(int64_t tokens) {
    return tokens * static_cast<int64_t>(sizeof(float)) + explain::RankedScores::Bytes(tokens);
  }

  bool done() const { return ended_ == call_->explanations.size(); }
  // Whether Step has something to do: an explanation whose tokens the trace holds, or one whose
  // tokens will never come because generation is over.
  bool ready(const model::SequenceTrace& trace, bool generation_over) const;
  // Runs the next slice, when ready.
  void Step(const model::SequenceTrace& trace, bool generation_over);

 private:
  // What is known of an explanation's target.
  struct Aim {
    std::vector<explain::Output> outputs;
    v1::ResolvedTarget target;
    bool ended = false;
  };
  void AddOutput(const PlannedExplanation& planned, int32_t position, int32_t token,
                 std::span<const float> logits, Aim& aim) const;
  // The next that is ready, or the number of explanations.
  size_t NextReady(const model::SequenceTrace& trace, bool generation_over) const;
  void Begin();
  // Of the method, or after it of the check of its scores.
  absl::Status NextSlice(const model::SequenceTrace& trace);
  explain::Subject SubjectOf(const PlannedExplanation& planned,
                             const model::SequenceTrace& trace) const;
  // What the finished scores, if they are one a token, say beyond themselves.
  void ReportScores(v1::ExplanationFinished* finished);
  void Finish(const absl::Status& status);
  void Send(v1::PredictEvent event);

  Call* call_;
  explain::EventSink* sink_;
  ThreadPool* pool_;
  observe::Metrics* metrics_;
  const Clock* clock_;

  std::vector<Aim> aims_;        // one for each explanation
  std::vector<int32_t> tokens_;  // of the prompt and generated ones that are explained; never moves
  mutable explain::GradientCache gradients_;
  size_t ended_ = 0, current_ = 0;
  std::unique_ptr<explain::TensorWriter> writer_;    // null: the current one has not begun
  std::unique_ptr<explain::Explaining> explaining_;  // until the method's last slice
  v1::ExplanationFinished finding_;                  // what it said then
  std::vector<float> scores_;                        // its main tensor, if that is one a token
  std::unique_ptr<explain::FaithfulnessRun> check_;  // from then on
  explain::AgreementList agreements_;
  int64_t slices_done_ = 0;
  absl::Duration compute_;
};

}  // namespace mambascope::serving
