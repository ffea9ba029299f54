#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/tensors.h"
#include "mambascope/v1/prediction.pb.h"

namespace mambascope::cli {

// One explanation as it arrived.
struct ExplanationAnswer {
  v1::ExplanationStarted started;
  TensorSet tensors;
  bool finished = false;
  v1::ExplanationFinished end;  // if finished

  // Finished without an error: its tensors are whole and checked.
  bool succeeded() const { return finished && end.status().code() == 0; }
};

// What the events of one request add up to, checked while they come.
class Answer {
 public:
  // `keep_tensors`: whether tensors are kept, or only checked.
  explicit Answer(bool keep_tensors) : keep_tensors_(keep_tensors) {}

  // A status other than OK says what about the event contradicts the contract or earlier events.
  absl::Status Add(const v1::PredictEvent& event);

  bool is_started() const { return is_started_; }
  bool is_finished() const { return is_finished_; }
  const std::string& request_id() const { return request_id_; }
  const v1::Started& started() const { return started_; }
  const std::vector<v1::TokenEvent>& generated() const { return generated_; }
  const v1::Classification& classification() const { return classification_; }
  // Of the prediction itself.
  const TensorSet& tensors() const { return tensors_; }
  // In the order in which they began.
  const std::vector<ExplanationAnswer>& explanations() const { return explanations_; }
  const v1::Finished& finished() const { return finished_; }

 private:
  ExplanationAnswer* Find(const std::string& id);
  absl::Status AddStarted(const v1::ExplanationStarted& started);
  absl::Status AddChunk(const v1::TensorChunk& chunk);
  absl::Status AddFinished(const v1::ExplanationFinished& finished);
  absl::Status End(const v1::Finished& finished);

  const bool keep_tensors_;
  bool is_started_ = false, is_finished_ = false;
  std::string request_id_;
  v1::Started started_;
  std::vector<v1::TokenEvent> generated_;
  v1::Classification classification_;
  TensorSet tensors_;
  std::vector<ExplanationAnswer> explanations_;
  v1::Finished finished_;
};

}  // namespace mambascope::cli
