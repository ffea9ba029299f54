#include "server/serving/executor.h"

#include <algorithm>
#include <exception>
#include <map>
#include <new>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/explain/tensor_writer.h"
#include "server/serving/classification.h"
#include "server/serving/errors.h"
#include "server/serving/explanation_run.h"
#include "server/serving/generation.h"

namespace mambascope::serving {
namespace {

using observe::Metrics;

// Puts the request's id on every event.
class CallSink : public explain::EventSink {
 public:
  explicit CallSink(const Call& call) : call_(call) {}
  void Send(v1::PredictEvent event) override {
    event.set_request_id(call_.request_id);
    call_.results->Send(std::move(event));
  }

 private:
  const Call& call_;
};

// The position that the prediction is read from.
int32_t PredictingPosition(const Call& call) {
  const model::ModelConfig& config = call.model->model->config();
  return static_cast<int32_t>(call.image.empty() ? call.length - 1
                                                 : config.vision.class_position());
}

// The prompt positions whose logits somebody needs, ascending.
std::vector<int32_t> WantedPositions(const Call& call) {
  std::set<int32_t> wanted = {PredictingPosition(call)};
  for (const PlannedExplanation& planned : call.explanations) {
    if (planned.position < call.length) wanted.insert(planned.position);
  }
  return {wanted.begin(), wanted.end()};
}

}  // namespace

// A call in the executor's hands.
struct Executor::Running {
  // Allocates everything before it is given the call, which therefore survives a lack of memory.
  Running(Call& taken, model::RecurrentState zeros, ThreadPool* pool, Metrics* metrics,
          const Clock* clock)
      : sink(taken),
        state(std::move(zeros)),
        wanted(WantedPositions(taken)),
        generation(taken.request.generation(), *taken.model),
        explanations(&taken, &sink, pool, metrics, clock),
        sequence_held(metrics->Hold(Metrics::Gauge::kRunningSequences)) {
    if (!taken.explanations.empty()) {
      trace.emplace(taken.model->model->config(), taken.traced_tokens, taken.stream_stride);
      explanations_held = metrics->Hold(Metrics::Gauge::kRunningExplanations);
    }
  }

  bool in_prefill() const { return computed < call->length; }
  bool needs_pass() const { return !generation.is_over(); }
  bool needs_slice() const {
    return !in_prefill() && !explanations.done() &&
           explanations.ready(*trace, generation.is_over());
  }
  bool finished() const { return generation.is_over() && explanations.done(); }

  std::unique_ptr<Call> call;
  CallSink sink;
  model::RecurrentState state;
  std::optional<model::SequenceTrace> trace;
  int64_t computed = 0;  // prompt tokens
  std::vector<int32_t> wanted;
  Generation generation;
  ExplanationRun explanations;
  Metrics::Held sequence_held, explanations_held;

  absl::Status failure;  // ends the call after this turn

  // The next `count` tokens; fills the members below, which the piece borrows.
  model::Piece NextPiece(int64_t count) {
    model::Piece piece;
    piece.state = &state;
    logit_rows.clear();
    if (in_prefill()) {
      if (call->image.empty()) {
        piece.tokens = std::span(call->tokens).subspan(computed, count);
      } else {
        piece.image = call->image;
      }
      piece.trace = trace.has_value() ? &*trace : nullptr;
      for (const int32_t position : wanted) {
        if (position >= computed && position < computed + count) {
          logit_rows.push_back(static_cast<int32_t>(position - computed));
        }
      }
    } else {
      step_token = generation.last_token();
      if (trace.has_value() && trace->tokens < trace->capacity) piece.trace = &*trace;
      piece.tokens = std::span(&step_token, 1);
      logit_rows.push_back(0);
    }
    piece.logit_rows = logit_rows;
    piece.logits = &logits;
    return piece;
  }

  // Of the pass under way.
  int32_t step_token = 0;
  std::vector<int32_t> logit_rows;
  std::vector<float> logits;
};

Executor::Executor(ThreadPool* pool, Metrics* metrics, const Completion* completion,
                   const Clock* clock, const ExecutorOptions& options)
    : pool_(pool), metrics_(metrics), completion_(completion), clock_(clock), options_(options) {}

Executor::~Executor() {
  {
    std::lock_guard lock(mu_);
    draining_ = true;
    stopping_ = true;
    aborting_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  } else {
    absl::Time look_again;
    while (Turn(&look_again)) {
    }
  }
}

void Executor::Start() {
  thread_ = std::thread([this] { Loop(); });
}

absl::Status Executor::Submit(std::unique_ptr<Call>& call) {
  {
    std::lock_guard lock(mu_);
    if (draining_) {
      return WithRetryInfo(absl::UnavailableError("the server is shutting down"), absl::Seconds(1));
    }
    if (static_cast<int32_t>(queue_.size()) + submitting_ >= options_.max_queue) {
      return WithRetryInfo(absl::ResourceExhaustedError(absl::StrCat(
                               "the queue is full: ", options_.max_queue, " calls wait")),
                           absl::Seconds(1));
    }
    ++submitting_;
    idle_ = false;
  }
  // Outside the lock: sending runs the reader's callback. Before the call is queued: the executor
  // may end it at once, and `started` comes first.
  v1::PredictEvent event;
  event.set_request_id(call->request_id);
  *event.mutable_started() = std::move(call->started);
  call->results->Send(std::move(event));
  call->timeline.queued = clock_->Now();
  call->queued = metrics_->Hold(Metrics::Gauge::kQueueDepth);
  {
    std::lock_guard lock(mu_);
    queue_.push_back(std::move(call));
    --submitting_;
    woken_ = true;
  }
  changed_.notify_all();
  return absl::OkStatus();
}

void Executor::Wake() {
  {
    std::lock_guard lock(mu_);
    woken_ = true;
  }
  changed_.notify_all();
}

void Executor::Drain(absl::Time limit) {
  std::unique_lock lock(mu_);
  draining_ = true;
  const auto idle = [this] { return idle_; };
  const absl::Duration patience = std::max(limit - clock_->Now(), absl::ZeroDuration());
  if (changed_.wait_for(lock, absl::ToChronoNanoseconds(patience), idle)) return;
  aborting_ = true;
  woken_ = true;
  changed_.notify_all();
  changed_.wait(lock, idle);
}

void Executor::Loop() {
  while (true) {
    absl::Time look_again = absl::InfiniteFuture();
    const bool worked = Turn(&look_again);
    std::unique_lock lock(mu_);
    if (idle_ && stopping_) return;
    if (worked) continue;
    const auto woken = [this] { return woken_ || stopping_; };
    if (look_again == absl::InfiniteFuture()) {
      changed_.wait(lock, woken);
    } else {
      changed_.wait_for(lock, absl::ToChronoNanoseconds(look_again - clock_->Now()), woken);
    }
  }
}

bool Executor::Turn(absl::Time* look_again) {
  *look_again = absl::InfiniteFuture();
  TakeWaiting(look_again);
  DropEnded(look_again);
  bool worked = RunPasses();
  worked = RunSlice() || worked;
  RemoveFinished();
  {
    std::lock_guard lock(mu_);
    idle_ = queue_.empty() && submitting_ == 0 && running_.empty();
    if (!idle_) return worked;
  }
  changed_.notify_all();  // Drain waits for it
  return worked;
}

void Executor::TakeWaiting(absl::Time* look_again) {
  std::vector<std::unique_ptr<Call>> taken;
  {
    std::lock_guard lock(mu_);
    woken_ = false;
    std::vector<WaitingCall> waiting;
    for (auto it = queue_.begin(); it != queue_.end();) {
      // Ended calls leave the queue at once, not when they are reached.
      if (!EndReason(**it).ok()) {
        taken.push_back(std::move(*it));
        it = queue_.erase(it);
        continue;
      }
      *look_again = std::min(*look_again, (*it)->deadline);
      waiting.push_back({(*it)->timeline.queued, (*it)->length});
      ++it;
    }
    // Calls that only explain hold no place: their memory is bounded by its budget, and a
    // prediction must not wait for somebody else's explanation or slow reader.
    const auto predicting =
        std::count_if(running_.begin(), running_.end(),
                      [](const auto& running) { return running->needs_pass(); });
    const QueueDecision decision =
        DecideQueue(waiting, static_cast<int32_t>(predicting), clock_->Now(), options_.batch);
    *look_again = std::min(*look_again, decision.look_again);
    for (int32_t i = 0; i < decision.take; ++i) {
      taken.push_back(std::move(queue_.front()));
      queue_.pop_front();
    }
  }
  for (std::unique_ptr<Call>& call : taken) {
    if (const absl::Status reason = EndReason(*call); !reason.ok()) {
      completion_->End(*call, reason);
      continue;
    }
    call->timeline.started = clock_->Now();
    call->queued = {};
    try {
      absl::StatusOr<model::RecurrentState> state = call->model->model->NewState();
      if (!state.ok()) {  // the device's memory is short: this call's misfortune alone
        completion_->End(*call, state.status());
        continue;
      }
      auto running = std::make_unique<Running>(*call, *std::move(state), pool_, metrics_, clock_);
      running->call = std::move(call);
      running_.push_back(std::move(running));
    } catch (const std::bad_alloc&) {
      completion_->End(*call, absl::ResourceExhaustedError("out of memory"));
    }
  }
}

absl::Status Executor::EndReason(const Call& call) const {
  // The deadline first: when it passes, gRPC cancels the call as well.
  if (clock_->Now() >= call.deadline) return absl::DeadlineExceededError("the deadline has passed");
  if (call.results->cancelled()) return absl::CancelledError("the caller left");
  if (aborting_) return absl::UnavailableError("the server is shutting down");
  return absl::OkStatus();
}

void Executor::DropEnded(absl::Time* look_again) {
  for (auto it = running_.begin(); it != running_.end();) {
    Call& call = *(*it)->call;
    const absl::Status reason = EndReason(call);
    if (reason.ok()) {
      *look_again = std::min(*look_again, call.deadline);
      ++it;
    } else {
      End(**it, reason);
      it = running_.erase(it);
    }
  }
}

// What the sequence holds is given back before the call's end is told.
void Executor::End(Running& running, const absl::Status& status) {
  running.sequence_held = {};
  running.explanations_held = {};
  running.call->text = running.generation.text();
  running.call->generated_tokens = running.generation.count();
  running.call->finish_reason = running.generation.finish_reason();
  completion_->End(*running.call, status);
}

bool Executor::RunPasses() {
  std::map<const ServedModel*, std::vector<Running*>> by_model;
  for (const auto& running : running_) {
    if (running->needs_pass()) by_model[running->call->model.get()].push_back(running.get());
  }
  for (auto& [served, sequences] : by_model) RunPass(*served, sequences);
  return !by_model.empty();
}

void Executor::RunPass(const ServedModel& served, std::vector<Running*>& sequences) {
  std::vector<SequenceNeed> needs;
  for (const Running* running : sequences) {
    const Call& call = *running->call;
    needs.push_back({running->computed, call.length - running->computed, !call.image.empty()});
  }
  const std::vector<int64_t> counts = PlanPass(needs, options_.batch.max_batch_tokens);

  std::vector<model::Piece> pieces;
  std::vector<Running*> owners;
  int prompt_tokens = 0, steps = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (counts[i] == 0) continue;
    (sequences[i]->in_prefill() ? prompt_tokens : steps) += static_cast<int>(counts[i]);
    pieces.push_back(sequences[i]->NextPiece(counts[i]));
    owners.push_back(sequences[i]);
  }
  const auto all_left = [&] {
    return std::all_of(owners.begin(), owners.end(),
                       [&](const Running* running) { return !EndReason(*running->call).ok(); });
  };
  metrics_->ForwardPass(served.name, static_cast<int>(pieces.size()), prompt_tokens, steps);
  const absl::Time begin = clock_->Now();
  absl::Status status;
  try {
    status = served.model->Forward(*pool_, workspace_, pieces, all_left);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("out of memory");
  }
  const absl::Duration spent = clock_->Now() - begin;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (status.ok()) {
      Deliver(*owners[i], pieces[i], spent);
    } else {
      // Cancelled: each has its own reason, which the next turn finds.
      owners[i]->failure = absl::IsCancelled(status) ? EndReason(*owners[i]->call) : status;
    }
  }
}

void Executor::Deliver(Running& running, const model::Piece& piece, absl::Duration spent) {
  Call& call = *running.call;
  const bool prefill = running.in_prefill();
  (prefill ? call.timeline.prefill : call.timeline.decode) += spent;
  if (piece.nonfinite_layer >= 0) {
    metrics_->NonFiniteResult(call.model->name);
    running.failure = absl::InternalError(absl::StrCat("the result is not finite from layer ",
                                                       piece.nonfinite_layer, " of ",
                                                       call.model->model->config().layers, " on"));
    return;
  }
  const int64_t first = running.computed;
  const model::ModelConfig& config = call.model->model->config();
  if (prefill) running.computed += model::RowsOf(config, piece);
  const int32_t predicting = PredictingPosition(call);
  const size_t outputs = config.outputs();
  for (size_t row = 0; row < piece.logit_rows.size(); ++row) {
    const std::span<const float> logits(running.logits.data() + row * outputs, outputs);
    if (prefill) {
      const auto position = static_cast<int32_t>(first + piece.logit_rows[row]);
      running.explanations.NoteLogits(position, logits);
      if (position != predicting) continue;
    }
    SendPrediction(running, logits);
    if (config.task == model::Task::kNextToken) {
      running.explanations.NoteGenerated(running.generation.count() - 1,
                                         running.generation.last_token(), logits);
    }
    if (prefill && call.request.generation().return_logits()) SendLogits(running, logits);
  }
}

void Executor::SendPrediction(Running& running, std::span<const float> logits) {
  const model::ModelConfig& config = running.call->model->model->config();
  v1::PredictEvent event;
  if (config.task == model::Task::kNextToken) {
    *event.mutable_token() = running.generation.Next(logits);
    metrics_->TokenGenerated(running.call->model->name);
  } else {
    *event.mutable_classification() =
        Classify(logits, config, running.call->request.generation().top_logprobs());
    running.generation.EndWith(v1::FINISH_REASON_CLASSIFIED);
  }
  running.sink.Send(std::move(event));
}

void Executor::SendLogits(Running& running, std::span<const float> logits) {
  Call& call = *running.call;
  explain::TensorWriter writer("", {LogitsInfo(call.model->model->config())}, call.max_chunk_bytes,
                               &running.sink);
  writer.Write("logits", logits);
  call.tensor_bytes += writer.bytes_written();
}

// Round robin over the calls whose reader keeps up.
bool Executor::RunSlice() {
  const auto ready = [](const Running& running) {
    return running.failure.ok() && running.needs_slice() && running.call->results->HasRoom();
  };
  auto last = std::find_if(running_.begin(), running_.end(), [&](const auto& running) {
    return running->call.get() == last_sliced_;
  });
  if (last == running_.end()) last = running_.begin();  // at its place in the order, or the first
  auto it = last;
  for (size_t tried = 0; tried < running_.size(); ++tried) {
    if (it == running_.end() || ++it == running_.end()) it = running_.begin();
    Running& running = **it;
    if (!ready(running)) continue;
    last_sliced_ = running.call.get();
    try {
      running.explanations.Step(*running.trace, running.generation.is_over());
    } catch (const std::bad_alloc&) {
      running.failure = absl::ResourceExhaustedError("out of memory");
    }
    return true;
  }
  return false;
}

void Executor::RemoveFinished() {
  for (auto it = running_.begin(); it != running_.end();) {
    if ((*it)->failure.ok() && !(*it)->finished()) {
      ++it;
      continue;
    }
    End(**it, (*it)->failure);
    it = running_.erase(it);
  }
}

}  // namespace mambascope::serving
