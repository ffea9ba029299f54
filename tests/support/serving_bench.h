#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/thread_pool.h"
#include "server/observe/log.h"
#include "server/observe/metrics.h"
#include "server/serving/admission.h"
#include "server/serving/completion.h"
#include "server/serving/executor.h"
#include "tests/support/fake_clock.h"
#include "tests/support/served_models.h"

namespace mambascope::serving {

// Admission and executor around the real models, without threads and without gRPC: a test turns the
// executor itself and reads the streams itself.
class ServingBench {
 public:
  explicit ServingBench(ExecutorOptions options = {}, AdmissionLimits limits = {},
                        int64_t budget_bytes = int64_t{1} << 30)
      : budget(budget_bytes),
        admission(&TestModels(), &budget, &metrics, &clock, limits),
        completion(&metrics, &clock),
        executor(&pool, &metrics, &completion, &clock, options),
        stream_bytes_(limits.stream_bytes) {
    observe::SetLogLevel(observe::LogLevel::kOff);
  }

  struct Sent {
    absl::Status refusal;  // OK: taken
    std::shared_ptr<ResultStream> results;
  };
  Sent Send(v1::PredictRequest request, absl::Time deadline = absl::InfiniteFuture()) {
    Sent sent;
    sent.results = std::make_shared<ResultStream>(stream_bytes_, [this] { executor.Wake(); });
    std::string model_name;
    auto call =
        admission.Admit(std::move(request), clock.Now(), deadline, "id", sent.results, &model_name);
    sent.refusal = call.status();
    if (call.ok()) sent.refusal = executor.Submit(*call);
    return sent;
  }

  // Turns until nothing is left to do.
  void Run() {
    absl::Time look_again;
    while (executor.Turn(&look_again)) {
    }
  }

  static std::vector<v1::PredictEvent> Read(ResultStream& results) {
    std::vector<v1::PredictEvent> events;
    v1::PredictEvent event;
    while (results.TryPop(&event) == ResultStream::Next::kEvent) events.push_back(std::move(event));
    return events;
  }

  ThreadPool pool{2};
  observe::Metrics metrics;
  FakeClock clock;
  MemoryBudget budget;
  Admission admission;
  Completion completion;
  Executor executor;

 private:
  int64_t stream_bytes_;
};

inline v1::PredictRequest TinyRequest(std::vector<int32_t> ids, int max_tokens = 1) {
  v1::PredictRequest request;
  request.set_model("tiny");
  v1::TokenIds* input = request.mutable_token_ids();
  for (int32_t id : ids) input->add_ids(id);
  request.mutable_generation()->set_max_tokens(max_tokens);
  request.mutable_generation()->set_ignore_eos(true);
  return request;
}

inline v1::PredictRequest AtlasRequest(const std::string& text, int max_tokens = 1) {
  v1::PredictRequest request;
  request.set_model("atlas");
  request.set_text(text);
  request.mutable_generation()->set_max_tokens(max_tokens);
  return request;
}

}  // namespace mambascope::serving
