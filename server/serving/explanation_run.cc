#include "server/serving/explanation_run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/explain/aggregation.h"
#include "server/explain/upsample.h"
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
      aims_(call->explanations.size()) {
  if (aims_.empty()) return;
  tokens_.reserve(call->traced_tokens);
  tokens_.insert(tokens_.end(), call->tokens.begin(), call->tokens.end());
}

void ExplanationRun::AddOutput(const PlannedExplanation& planned, int32_t position, int32_t token,
                               std::span<const float> logits, Aim& aim) const {
  explain::Output output;
  output.position = position;
  output.token = token;
  output.contrast = planned.contrast_token.value_or(-1);
  v1::ResolvedTarget& target = aim.target;
  target.set_position(position);
  target.set_token_id(token);
  target.set_piece(Spelled(*call_->model, token));
  const float log_probability = model::LogProbability(logits, token);
  target.set_log_probability(target.log_probability() + log_probability);
  float value = logits[token];
  if (planned.options.target().value() == v1::OUTPUT_VALUE_LOG_PROBABILITY) value = log_probability;
  if (planned.contrast_token.has_value()) {
    target.set_contrast_token_id(*planned.contrast_token);
    target.set_contrast_piece(Spelled(*call_->model, *planned.contrast_token));
    value = logits[token] - logits[*planned.contrast_token];
  }
  target.set_value(target.value() + value);
  aim.outputs.push_back(output);
}

void ExplanationRun::NoteLogits(int32_t position, std::span<const float> logits) {
  for (size_t i = 0; i < aims_.size(); ++i) {
    const PlannedExplanation& planned = call_->explanations[i];
    if (planned.generated_end > 0 || planned.position != position) continue;
    const auto most_probable = std::max_element(logits.begin(), logits.end()) - logits.begin();
    AddOutput(planned, position, planned.token.value_or(static_cast<int32_t>(most_probable)),
              logits, aims_[i]);
  }
}

void ExplanationRun::NoteGenerated(int32_t index, int32_t token, std::span<const float> logits) {
  const auto position = static_cast<int32_t>(call_->length + index - 1);
  for (size_t i = 0; i < aims_.size(); ++i) {
    const PlannedExplanation& planned = call_->explanations[i];
    if (index < planned.generated_begin || index >= planned.generated_end) continue;
    AddOutput(planned, position, planned.token.value_or(token), logits, aims_[i]);
    aims_[i].target.set_generated(planned.generated_begin);
    if (planned.generated_end > planned.generated_begin + 1) {
      aims_[i].target.set_generated_end(planned.generated_end);
    }
  }
  if (static_cast<int64_t>(tokens_.size()) < call_->traced_tokens) tokens_.push_back(token);
}

size_t ExplanationRun::NextReady(const model::SequenceTrace& trace, bool generation_over) const {
  for (size_t i = 0; i < aims_.size(); ++i) {
    const PlannedExplanation& planned = call_->explanations[i];
    if (!aims_[i].ended && (generation_over || trace.tokens >= planned.tokens)) return i;
  }
  return aims_.size();
}

bool ExplanationRun::ready(const model::SequenceTrace& trace, bool generation_over) const {
  return writer_ != nullptr || NextReady(trace, generation_over) < aims_.size();
}

void ExplanationRun::Send(v1::PredictEvent event) { sink_->Send(std::move(event)); }

explain::Subject ExplanationRun::SubjectOf(const PlannedExplanation& planned,
                                           const model::SequenceTrace& trace) const {
  const Aim& aim = aims_[current_];
  explain::Subject subject;
  subject.model = call_->model->model.get();
  subject.trace = &trace;
  subject.pool = pool_;
  subject.position = planned.position;
  subject.tokens = planned.tokens;
  if (call_->image.empty()) subject.token_ids = std::span(tokens_).first(planned.tokens);
  subject.image = call_->image;
  subject.outputs = aim.outputs;
  if (planned.options.target().value() == v1::OUTPUT_VALUE_LOG_PROBABILITY) {
    subject.value = v1::OUTPUT_VALUE_LOG_PROBABILITY;
  }
  subject.explained = aim.target.value();
  subject.gradients = &gradients_;
  const std::vector<int32_t>& end_of_text = subject.model->config().end_of_text;
  subject.padding_token = end_of_text.empty() ? -1 : end_of_text.front();
  return subject;
}

void ExplanationRun::Begin() {
  const PlannedExplanation& planned = call_->explanations[current_];
  v1::PredictEvent event;
  v1::ExplanationStarted* started = event.mutable_explanation_started();
  started->set_explanation_id(planned.options.id());
  started->set_method(std::string(planned.method->name()));
  *started->mutable_target() = aims_[current_].target;
  for (const v1::TensorInfo& tensor : planned.plan.tensors) *started->add_tensors() = tensor;
  Send(std::move(event));

  slices_done_ = 0;
  compute_ = absl::ZeroDuration();
  writer_ = std::make_unique<explain::TensorWriter>(planned.options.id(), planned.plan.tensors,
                                                    call_->max_chunk_bytes, sink_,
                                                    call_->request.delivery());
  scores_.clear();
  if (explain::OneScorePerToken(planned.plan, planned.tokens)) {
    writer_->Record(planned.plan.tensors.front().name(), &scores_);
  }
}

absl::Status ExplanationRun::NextSlice(const model::SequenceTrace& trace) {
  const PlannedExplanation& planned = call_->explanations[current_];
  if (slices_done_ < planned.method_slices) {
    RETURN_IF_ERROR(explaining_->Step(*writer_));
    if (slices_done_ + 1 < planned.method_slices) return absl::OkStatus();
    finding_.Clear();
    *finding_.mutable_quality() = explaining_->quality();
    explaining_->Describe(&finding_);
    explaining_ = nullptr;  // its memory is the check's now
    return absl::OkStatus();
  }
  if (check_ == nullptr) {
    check_ = std::make_unique<explain::FaithfulnessRun>(planned.options, SubjectOf(planned, trace),
                                                        scores_);
  }
  RETURN_IF_ERROR(check_->Step(*writer_));
  if (slices_done_ + 1 == planned.plan.slices) *finding_.mutable_faithfulness() = check_->report();
  return absl::OkStatus();
}

void ExplanationRun::Step(const model::SequenceTrace& trace, bool generation_over) {
  const bool begins = writer_ == nullptr;
  if (begins) {
    current_ = NextReady(trace, generation_over);
    Begin();
  }
  const PlannedExplanation& planned = call_->explanations[current_];
  const v1::ResolvedTarget& target = aims_[current_].target;
  if (trace.tokens < planned.tokens || aims_[current_].outputs.empty()) {
    Finish(absl::OutOfRangeError(absl::StrCat(
        "target.generated: generation ended before token ", planned.generated_end - 1,
        ", which it names; the last is ", int64_t(tokens_.size()) - call_->length - 1)));
    return;
  }
  if (target.has_contrast_token_id() && target.contrast_token_id() == target.token_id()) {
    Finish(absl::InvalidArgumentError(absl::StrCat(
        "target: the model's own prediction is the contrast, token ", target.token_id())));
    return;
  }
  const absl::Time begin = clock_->Now();
  if (begins) explaining_ = planned.method->Start(planned.options, SubjectOf(planned, trace));
  const absl::Status status = NextSlice(trace);
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
  event.mutable_progress()->set_done(static_cast<int32_t>(slices_done_));
  event.mutable_progress()->set_total(static_cast<int32_t>(planned.plan.slices));
  Send(std::move(event));
}

void ExplanationRun::ReportScores(v1::ExplanationFinished* finished) {
  if (scores_.empty()) return;
  const v1::Explanation& options = call_->explanations[current_].options;
  for (v1::GroupedScores& grouped :
       explain::Aggregate(options.aggregation(), call_->request.text(), call_->spans, scores_)) {
    *finished->add_groups() = std::move(grouped);
  }
  if (options.aggregation().pixels()) {
    const std::vector<float> pixels =
        explain::PixelScores(scores_, call_->model->model->config().vision);
    writer_->Write("pixels", std::span<const float>(pixels));
  }
  agreements_.Add(options.id(), scores_, &call_->agreements);
}

void ExplanationRun::Finish(const absl::Status& status) {
  const PlannedExplanation& planned = call_->explanations[current_];
  v1::PredictEvent event;
  v1::ExplanationFinished* finished = event.mutable_explanation_finished();
  if (status.ok()) *finished = std::move(finding_);
  finished->set_explanation_id(planned.options.id());
  *finished->mutable_status() = ToRpcStatus(status);
  if (status.ok()) {
    ReportScores(finished);
    for (auto& digest : writer_->Finish()) *finished->add_digests() = std::move(digest);
    for (const float share : writer_->mass_kept()) finished->add_mass_kept(share);
  }
  finished->set_compute_seconds(absl::ToDoubleSeconds(compute_));
  call_->tensor_bytes += writer_->bytes_written();
  metrics_->ExplanationEnded(call_->model->name, planned.method->name(), CodeName(status.code()),
                             compute_, call_->model->speed.Seconds(planned.plan.work));
  Send(std::move(event));
  explaining_ = nullptr;
  check_ = nullptr;
  writer_ = nullptr;
  aims_[current_].ended = true;
  ++ended_;
}

}  // namespace mambascope::serving
