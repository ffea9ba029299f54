#include "client/cli/answer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"

namespace mambascope::cli {

ExplanationAnswer* Answer::Find(const std::string& id) {
  for (ExplanationAnswer& explanation : explanations_) {
    if (explanation.started.explanation_id() == id) return &explanation;
  }
  return nullptr;
}

absl::Status Answer::Add(const v1::PredictEvent& event) {
  if (is_finished_) return absl::DataLossError("an event came after `finished`");
  if (request_id_.empty()) request_id_ = event.request_id();
  // A request that is refused has a `finished` only.
  if (!is_started_ && !event.has_started() && !event.has_finished()) {
    return absl::DataLossError("an event came before `started`");
  }
  switch (event.event_case()) {
    case v1::PredictEvent::kStarted:
      if (is_started_) return absl::DataLossError("`started` came twice");
      is_started_ = true;
      started_ = event.started();
      return tensors_.Announce(started_.tensors(), keep_tensors_);
    case v1::PredictEvent::kToken:
      generated_.push_back(event.token());
      return absl::OkStatus();
    case v1::PredictEvent::kClassification:
      classification_ = event.classification();
      return absl::OkStatus();
    case v1::PredictEvent::kExplanationStarted:
      return AddStarted(event.explanation_started());
    case v1::PredictEvent::kTensorChunk:
      return AddChunk(event.tensor_chunk());
    case v1::PredictEvent::kExplanationFinished:
      return AddFinished(event.explanation_finished());
    case v1::PredictEvent::kFinished:
      return End(event.finished());
    default:  // progress, and what newer servers may send
      return absl::OkStatus();
  }
}

absl::Status Answer::AddStarted(const v1::ExplanationStarted& started) {
  if (Find(started.explanation_id()) != nullptr) {
    return absl::DataLossError(
        absl::StrCat("explanation '", started.explanation_id(), "' began twice"));
  }
  ExplanationAnswer& explanation = explanations_.emplace_back();
  explanation.started = started;
  return explanation.tensors.Announce(started.tensors(), keep_tensors_);
}

absl::Status Answer::AddChunk(const v1::TensorChunk& chunk) {
  if (chunk.explanation_id().empty()) return tensors_.Append(chunk);
  ExplanationAnswer* explanation = Find(chunk.explanation_id());
  if (explanation == nullptr || explanation->finished) {
    return absl::DataLossError(absl::StrCat("a piece came of explanation '", chunk.explanation_id(),
                                            "', which is not under way"));
  }
  return explanation->tensors.Append(chunk);
}

absl::Status Answer::AddFinished(const v1::ExplanationFinished& finished) {
  ExplanationAnswer* explanation = Find(finished.explanation_id());
  if (explanation == nullptr) {
    // It may fail before it has anything to announce.
    if (finished.status().code() == 0) {
      return absl::DataLossError(
          absl::StrCat("explanation '", finished.explanation_id(), "' ended before it began"));
    }
    explanation = &explanations_.emplace_back();
    explanation->started.set_explanation_id(finished.explanation_id());
  }
  if (explanation->finished) {
    return absl::DataLossError(
        absl::StrCat("explanation '", finished.explanation_id(), "' ended twice"));
  }
  explanation->finished = true;
  explanation->end = finished;
  if (finished.status().code() != 0) return absl::OkStatus();
  RETURN_IF_ERROR(explanation->tensors.CheckComplete());
  return explanation->tensors.CheckDigests(finished.digests());
}

absl::Status Answer::End(const v1::Finished& finished) {
  is_finished_ = true;
  finished_ = finished;
  if (finished.status().code() != 0) return absl::OkStatus();
  RETURN_IF_ERROR(tensors_.CheckComplete());
  for (const ExplanationAnswer& explanation : explanations_) {
    if (!explanation.finished) {
      return absl::DataLossError(
          absl::StrCat("explanation '", explanation.started.explanation_id(), "' never ended"));
    }
  }
  return absl::OkStatus();
}

}  // namespace mambascope::cli
