#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "mambascope/v1/prediction.pb.h"
#include "server/base/clock.h"
#include "server/observe/metrics.h"
#include "server/serving/call.h"
#include "server/serving/memory_budget.h"
#include "server/serving/model_repository.h"

namespace mambascope::serving {

struct AdmissionLimits {
  int32_t max_input_tokens = 16384;
  int32_t max_tokens = 4096;  // of one generation
  int64_t max_text_bytes = 1 << 20;
  int64_t stream_bytes = 4 << 20;  // results waiting for a slow reader, per call
  absl::Duration default_deadline = absl::Minutes(10);
  absl::Duration max_deadline = absl::Hours(1);
};

// Decides on a request before any work: pins the model version, tokenises, checks every field (all
// violations at once), plans the explanations and reserves their memory. Threads: any.
class Admission {
 public:
  Admission(const ModelRepository* repository, MemoryBudget* budget, observe::Metrics* metrics,
            const Clock* clock, const AdmissionLimits& limits)
      : repository_(repository),
        budget_(budget),
        metrics_(metrics),
        clock_(clock),
        limits_(limits) {}

  // `deadline`: the caller's own, or InfiniteFuture. `results` is made by the caller of this
  // function, who reads it. kInvalidArgument (BadRequest), kNotFound, kResourceExhausted
  // (RetryInfo), kUnimplemented. `model_name` is set once the model is resolved, also when the call
  // is refused later.
  absl::StatusOr<std::unique_ptr<Call>> Admit(v1::PredictRequest request, absl::Time arrival,
                                              absl::Time deadline, std::string request_id,
                                              std::shared_ptr<ResultStream> results,
                                              std::string* model_name) const;

  absl::StatusOr<v1::TokenizeResponse> Tokenize(const v1::TokenizeRequest& request,
                                                std::string* model_name) const;

  const AdmissionLimits& limits() const { return limits_; }

 private:
  absl::StatusOr<MemoryBudget::Reservation> ReserveInput(int64_t bytes) const;

  const ModelRepository* repository_;
  MemoryBudget* budget_;
  observe::Metrics* metrics_;
  const Clock* clock_;
  const AdmissionLimits limits_;
  // Of inputs while they are read, and of images until their call ends: two texts of a MiB at a
  // time, or hundreds of short ones.
  mutable MemoryBudget inputs_{int64_t{512} << 20};
};

}  // namespace mambascope::serving
