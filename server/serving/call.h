#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "mambascope/v1/prediction.pb.h"
#include "server/base/timeline.h"
#include "server/explain/aggregation.h"
#include "server/explain/method.h"
#include "server/observe/metrics.h"
#include "server/serving/memory_budget.h"
#include "server/serving/model_repository.h"
#include "server/serving/result_stream.h"

namespace mambascope::serving {

// One explanation of an admitted call: valid, planned, its target resolved as far as the request
// says.
struct PlannedExplanation {
  v1::Explanation options;  // id and, where given, target token ids filled in
  const explain::Method* method = nullptr;
  explain::Plan plan;         // with the faithfulness check's part, which comes after the method's
  int64_t method_slices = 0;  // of plan.slices
  int64_t tokens = 0;         // of the input that it explains: the prompt and what follows it
  int32_t position = 0;       // zero-based; of a span the last
  // The generated tokens that it explains; none for a position of the prompt.
  int32_t generated_begin = 0, generated_end = 0;
  std::optional<int32_t> token;  // absent: the model's own prediction
  std::optional<int32_t> contrast_token;
};

// An admitted Predict. Admission fills it; then it belongs to the executor, whose thread alone
// touches it until Completion has ended it. `results` is shared with the reader.
struct Call {
  std::string request_id;
  v1::PredictRequest request;
  std::shared_ptr<const ServedModel> model;
  std::vector<int32_t> tokens;            // of a text
  std::vector<explain::TokenSpan> spans;  // of the same tokens
  std::vector<float> image;  // of an image model, in place of tokens: [3, S, S] normalised
  std::vector<PlannedExplanation> explanations;
  int64_t traced_tokens = 0;  // the most that an explanation reads
  int32_t stream_stride = 0;  // of the trace
  int64_t length = 0;         // of the input in tokens, an image's patches and class token too
  v1::Started started;        // sent when the queue has taken the call
  int64_t max_chunk_bytes = 0;
  absl::Time deadline = absl::InfiniteFuture();
  Timeline timeline;
  std::shared_ptr<ResultStream> results;

  // What happened, for its end.
  v1::FinishReason finish_reason = v1::FINISH_REASON_UNSPECIFIED;
  std::string text;
  int32_t generated_tokens = 0;
  int64_t tensor_bytes = 0;
  google::protobuf::RepeatedPtrField<v1::Agreement> agreements;
  bool ended = false;

  // Given back with the call.
  observe::Metrics::Held in_flight;
  observe::Metrics::Held queued;
  MemoryBudget::Reservation memory, input_memory;
};

}  // namespace mambascope::serving
