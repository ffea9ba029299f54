#include "server/serving/explanation_run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/sampling.h"
#include "server/serving/completion.h"
#include "server/serving/errors.h"

namespace mambascope::serving {
namespace {

// A token's piece or a class's label; empty where the model has none.
std::string Spelled(const ServedModel& served, int32_t output) {
  const model::ModelConfig& config = served.model->config();
  if (config.task != model::Task::kNextToken) {
    return config.class_labels.empty() ? "" : config.class_labels[output];
  }
  return served.tokenizer == nullptr ? "" : served.tokenizer->Piece(output);
}

}  // namespace

ExplanationRun::ExplanationRun(Call* call, explain::EventSink* sink, ThreadPool* pool,
                               observe::Metrics* metrics, const Clock* clock)
    : call_(call),
      sink_(sink),
      pool_(pool),
      metrics_(metrics),
      clock_(clock),
      targets_(call->explanations.size()) {}

void ExplanationRun::ResolveTargets(int32_t position, std::span<const float> logits) {
  for (size_t i = 0; i < targets_.size(); ++i) {
    const PlannedExplanation& planned = call_->explanations[i];
    if (planned.position != position) continue;
    const auto most_probable = std::max_element(logits.begin(), logits.end()) - logits.begin();
    const int32_t token = planned.token.value_or(static_cast<int32_t>(most_probable));
    v1::ResolvedTarget& target = targets_[i];
    target.set_position(position);
    target.set_token_id(token);
    target.set_value(logits[token]);
    target.set_log_probability(model::LogProbability(logits, token));
    target.set_piece(Spelled(*call_->model, token));
    if (planned.contrast_token.has_value()) {
      target.set_contrast_token_id(*planned.contrast_token);
      target.set_value(logits[token] - logits[*planned.contrast_token]);
      target.set_contrast_piece(Spelled(*call_->model, *planned.contrast_token));
    }
  }
}

void ExplanationRun::Send(v1::PredictEvent event) { sink_->Send(std::move(event)); }

explain::Subject ExplanationRun::SubjectOf(const PlannedExplanation& planned,
                                           const model::SequenceTrace& trace) const {
  const v1::ResolvedTarget& target = targets_[current_];
  explain::Subject subject;
  subject.model = call_->model->model.get();
  subject.trace = &trace;
  subject.pool = pool_;
  subject.position = planned.position;
  subject.tokens = call_->length;
  subject.token_ids = call_->tokens;
  subject.image = call_->image;
  explain::Output output;
  output.position = planned.position;
  output.token = target.token_id();
  output.contrast = target.has_contrast_token_id() ? target.contrast_token_id() : -1;
  subject.outputs = {output};
  if (planned.options.target().value() == v1::OUTPUT_VALUE_LOG_PROBABILITY) {
    subject.value = v1::OUTPUT_VALUE_LOG_PROBABILITY;
  }
  subject.explained = target.value();
  subject.gradients = &gradients_;
  const std::vector<int32_t>& end_of_text = subject.model->config().end_of_text;
  subject.padding_token = end_of_text.empty() ? -1 : end_of_text.front();
  return subject;
}

void ExplanationRun::Begin(const model::SequenceTrace& trace) {
  const PlannedExplanation& planned = call_->explanations[current_];
  v1::PredictEvent event;
  v1::ExplanationStarted* started = event.mutable_explanation_started();
  started->set_explanation_id(planned.options.id());
  started->set_method(std::string(planned.method->name()));
  *started->mutable_target() = targets_[current_];
  for (const v1::TensorInfo& tensor : planned.plan.tensors) *started->add_tensors() = tensor;
  Send(std::move(event));

  slices_done_ = 0;
  compute_ = absl::ZeroDuration();
  writer_ = std::make_unique<explain::TensorWriter>(planned.options.id(), planned.plan.tensors,
                                                    call_->max_chunk_bytes, sink_);
  explaining_ = planned.method->Start(planned.options, SubjectOf(planned, trace));
}

void ExplanationRun::Step(const model::SequenceTrace& trace) {
  const PlannedExplanation& planned = call_->explanations[current_];
  if (explaining_ == nullptr) Begin(trace);
  const v1::ResolvedTarget& target = targets_[current_];
  if (target.has_contrast_token_id() && target.contrast_token_id() == target.token_id()) {
    Finish(absl::InvalidArgumentError(absl::StrCat(
        "target: the model's own prediction is the contrast, token ", target.token_id())));
    return;
  }
  const absl::Time begin = clock_->Now();
  const absl::Status status = explaining_->Step(*writer_);
  const absl::Duration spent = clock_->Now() - begin;
  compute_ += spent;
  call_->timeline.explain += spent;
  ++slices_done_;
  if (!status.ok() || slices_done_ >= planned.plan.slices) {
    Finish(status);
    return;
  }
  v1::PredictEvent event;
  event.mutable_progress()->set_explanation_id(planned.options.id());
  event.mutable_progress()->set_done(slices_done_);
  event.mutable_progress()->set_total(planned.plan.slices);
  Send(std::move(event));
}

void ExplanationRun::Finish(const absl::Status& status) {
  const PlannedExplanation& planned = call_->explanations[current_];
  v1::PredictEvent event;
  v1::ExplanationFinished* finished = event.mutable_explanation_finished();
  finished->set_explanation_id(planned.options.id());
  *finished->mutable_status() = ToRpcStatus(status);
  if (status.ok()) {
    *finished->mutable_quality() = explaining_->quality();
    for (auto& digest : writer_->Finish()) *finished->add_digests() = std::move(digest);
  }
  finished->set_compute_seconds(absl::ToDoubleSeconds(compute_));
  call_->tensor_bytes += writer_->bytes_written();
  metrics_->ExplanationEnded(call_->model->name, planned.method->name(), CodeName(status.code()),
                             compute_);
  Send(std::move(event));
  explaining_ = nullptr;
  writer_ = nullptr;
  ++current_;
}

}  // namespace mambascope::serving
