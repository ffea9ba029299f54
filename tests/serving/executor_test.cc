#include "server/serving/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/support/serving_bench.h"

namespace mambascope::serving {
namespace {

using testing::HasSubstr;

std::vector<int32_t> Tokens(const std::vector<v1::PredictEvent>& events) {
  std::vector<int32_t> tokens;
  for (const auto& event : events) {
    if (event.has_token()) tokens.push_back(event.token().token_id());
  }
  return tokens;
}

const v1::Finished& End(const std::vector<v1::PredictEvent>& events) {
  EXPECT_FALSE(events.empty());
  EXPECT_TRUE(events.back().has_finished());
  return events.back().finished();
}

double Metric(const ServingBench& bench, const std::string& name) {
  const std::string page = bench.metrics.Serialize();
  const size_t at = page.find("\n" + name);
  if (at == std::string::npos) return 0;
  const size_t space = page.find(' ', at + 1);
  return std::stod(page.substr(space + 1));
}

v1::PredictRequest Explained(v1::PredictRequest request) {
  request.add_explanations()->mutable_raw_attention();
  request.add_explanations()->mutable_attention_rollout();
  request.add_explanations()->mutable_hidden_attention();
  return request;
}

TEST(Executor, TheDemoModelKnowsTheCapitalOfFrance) {
  ServingBench bench;
  const auto sent = bench.Send(AtlasRequest("The capital of France is", 2));
  bench.Run();
  const auto events = ServingBench::Read(*sent.results);
  ASSERT_TRUE(events.front().has_started());
  EXPECT_EQ(events.front().started().model(), "atlas");
  EXPECT_EQ(events[1].token().text(), " Paris");
  EXPECT_TRUE(sent.results->final_status().ok());
  EXPECT_EQ(End(events).finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(End(events).usage().generated_tokens(), 2);
}

TEST(Executor, EventsComeInTheirOrder) {
  ServingBench bench;
  const auto sent = bench.Send(Explained(AtlasRequest("The capital of France is", 3)));
  bench.Run();
  std::string order, open;
  for (const v1::PredictEvent& event : ServingBench::Read(*sent.results)) {
    EXPECT_EQ(event.request_id(), "id");
    if (event.has_started()) order += "S";
    if (event.has_token()) order += "t";
    if (event.has_finished()) order += "F";
    if (event.has_explanation_started()) {
      EXPECT_EQ(open, "");
      open = event.explanation_started().explanation_id();
      EXPECT_EQ(event.explanation_started().target().piece(), "ĠParis");
    }
    if (event.has_tensor_chunk()) {
      EXPECT_EQ(event.tensor_chunk().explanation_id(), open);
    }
    if (event.has_explanation_finished()) {
      EXPECT_EQ(event.explanation_finished().explanation_id(), open);
      EXPECT_EQ(event.explanation_finished().status().code(), 0);
      EXPECT_TRUE(event.explanation_finished().quality().within_tolerance());
      EXPECT_EQ(event.explanation_finished().digests_size(), 1);
      open.clear();
    }
  }
  EXPECT_EQ(order, "StttF");
  EXPECT_EQ(open, "");
}

TEST(Executor, ThePredictionIsNotHeldBackByExplanations) {
  ServingBench bench;
  const auto sent = bench.Send(Explained(AtlasRequest("The capital of France is", 1)));
  absl::Time look_again;
  bench.executor.Turn(&look_again);  // one pass and one slice
  const auto events = ServingBench::Read(*sent.results);
  ASSERT_GE(events.size(), 2u);
  EXPECT_TRUE(events[1].has_token());
}

TEST(Executor, ASequenceDoesNotDependOnItsNeighbours) {
  std::mt19937 random(7);
  std::vector<v1::PredictRequest> requests;
  for (int length : {1, 33, 200, 3, 64, 65, 7}) {
    std::vector<int32_t> ids;
    for (int i = 0; i < length; ++i) ids.push_back(static_cast<int32_t>(random() % 101));
    requests.push_back(TinyRequest(ids, 6));
    requests.back().mutable_generation()->set_return_logits(true);
  }
  std::vector<std::string> alone;
  const auto outcome = [](const std::vector<v1::PredictEvent>& events) {
    std::string all;
    for (const auto& event : events) {
      if (event.has_token()) all += event.token().SerializeAsString();
      if (event.has_tensor_chunk()) all += event.tensor_chunk().data();
    }
    return all;
  };
  for (const auto& request : requests) {
    ServingBench bench({.batch = {.max_batch_tokens = 4096}});
    const auto sent = bench.Send(request);
    bench.Run();
    alone.push_back(outcome(ServingBench::Read(*sent.results)));
  }
  ServingBench bench({.batch = {.max_batch_tokens = 64}});  // prompts are cut, passes are mixed
  std::vector<ServingBench::Sent> sent;
  for (const auto& request : requests) {
    sent.push_back(bench.Send(request));
    absl::Time look_again;
    bench.executor.Turn(&look_again);  // they join while others run
  }
  bench.Run();
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(outcome(ServingBench::Read(*sent[i].results)), alone[i]) << "bit for bit";
  }
}

TEST(Executor, ACallerThatLeavesStopsTheWorkWithinOneStep) {
  ServingBench bench;
  const auto sent = bench.Send(TinyRequest({1, 2, 3}, 4000));
  absl::Time look_again;
  for (int i = 0; i < 10; ++i) bench.executor.Turn(&look_again);
  const double steps = Metric(bench, "mambascope_decode_steps_total");
  EXPECT_EQ(steps, 9);
  sent.results->Cancel();
  bench.Run();
  EXPECT_EQ(Metric(bench, "mambascope_decode_steps_total"), steps);
  EXPECT_EQ(Metric(bench, "mambascope_running_sequences"), 0);
  EXPECT_EQ(Metric(bench, "mambascope_calls_in_flight"), 0);
  EXPECT_TRUE(absl::IsCancelled(sent.results->final_status()));
  EXPECT_EQ(Metric(bench, "mambascope_request_duration_seconds_count{code=\"CANCELLED\""), 1);
}

TEST(Executor, ADeadlineEndsARunningAndAWaitingCall) {
  ServingBench bench({.batch = {.max_running = 1}});
  const absl::Time deadline = bench.clock.Now() + absl::Seconds(5);
  const auto running = bench.Send(TinyRequest({1}, 4000), deadline);
  const auto waiting = bench.Send(TinyRequest({1}, 4000), deadline);
  absl::Time look_again;
  for (int i = 0; i < 5; ++i) bench.executor.Turn(&look_again);
  bench.clock.Advance(absl::Seconds(6));
  bench.executor.Turn(&look_again);
  EXPECT_TRUE(absl::IsDeadlineExceeded(running.results->final_status()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(waiting.results->final_status()))
      << "expired calls leave the queue at once, not when they are reached";
  const auto events = ServingBench::Read(*waiting.results);
  EXPECT_EQ(End(events).status().code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(End(events).finish_reason(), v1::FINISH_REASON_ERROR);
}

TEST(Executor, AFullQueueRefusesWithATimeToRetry) {
  ServingBench bench({.max_queue = 2});
  EXPECT_TRUE(bench.Send(TinyRequest({1})).refusal.ok());
  EXPECT_TRUE(bench.Send(TinyRequest({1})).refusal.ok());
  const absl::Status status = bench.Send(TinyRequest({1})).refusal;
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_TRUE(status.GetPayload("type.googleapis.com/google.rpc.RetryInfo").has_value());
  bench.Run();
  EXPECT_TRUE(bench.Send(TinyRequest({1})).refusal.ok());
}

TEST(Executor, ASlowReaderSlowsOnlyItsOwnExplanation) {
  ServingBench bench({}, {.stream_bytes = 2000});
  const std::vector<int32_t> ids(60, 5);
  v1::PredictRequest request = TinyRequest(ids);
  request.add_explanations()->mutable_hidden_attention();  // 4 layers of 14 kB
  const auto slow = bench.Send(request);
  bench.Run();  // nobody reads: it stops after the first layer
  EXPECT_GT(Metric(bench, "mambascope_running_explanations"), 0);
  const auto other = bench.Send(TinyRequest(ids));
  bench.Run();
  EXPECT_TRUE(End(ServingBench::Read(*other.results)).status().code() == 0);
  int chunks = 0;
  for (int i = 0; i < 20; ++i) {
    for (const auto& event : ServingBench::Read(*slow.results)) chunks += event.has_tensor_chunk();
    bench.Run();
  }
  EXPECT_EQ(chunks, 4);
  EXPECT_EQ(Metric(bench, "mambascope_running_explanations"), 0);
  EXPECT_TRUE(slow.results->final_status().ok());
}

TEST(Executor, StalledReadersTakeNoPlaceFromPredictions) {
  ServingBench bench({.batch = {.max_running = 1}}, {.stream_bytes = 2000});
  v1::PredictRequest request = TinyRequest(std::vector<int32_t>(60, 5));
  request.add_explanations()->mutable_hidden_attention();
  std::vector<ServingBench::Sent> stalled;
  for (int i = 0; i < 3; ++i) {
    stalled.push_back(bench.Send(request));
    bench.Run();
  }
  EXPECT_EQ(Metric(bench, "mambascope_running_explanations"), 3);
  const auto other = bench.Send(TinyRequest({1, 2}));
  bench.Run();
  EXPECT_TRUE(End(ServingBench::Read(*other.results)).status().code() == 0);
}

TEST(Executor, OneFailedExplanationLeavesThePredictionAndTheOthersAlone) {
  ServingBench bench;
  v1::PredictRequest request = AtlasRequest("The capital of France is");
  v1::Explanation* contrast = request.add_explanations();
  contrast->mutable_raw_attention();
  contrast->mutable_target()->set_contrast_text(" Paris");  // what the model predicts by itself
  request.add_explanations()->mutable_attention_rollout();
  const auto sent = bench.Send(request);
  bench.Run();
  int failed = 0, fine = 0;
  const auto events = ServingBench::Read(*sent.results);
  for (const auto& event : events) {
    if (!event.has_explanation_finished()) continue;
    (event.explanation_finished().status().code() == 0 ? fine : failed)++;
  }
  EXPECT_EQ(failed, 1);
  EXPECT_EQ(fine, 1);
  EXPECT_EQ(End(events).status().code(), 0);
}

TEST(Executor, DestructionEndsEveryCall) {
  std::vector<ServingBench::Sent> sent;
  {
    ServingBench bench({.batch = {.max_running = 1}});
    sent.push_back(bench.Send(TinyRequest({1}, 4000)));
    sent.push_back(bench.Send(TinyRequest({1}, 4000)));
    absl::Time look_again;
    bench.executor.Turn(&look_again);
  }
  for (const auto& call : sent) EXPECT_TRUE(absl::IsUnavailable(call.results->final_status()));
}

TEST(Executor, DrainLetsRunningCallsFinishAndRefusesNewOnes) {
  ServingBench bench;
  bench.executor.Start();
  const auto sent = bench.Send(TinyRequest({1, 2}, 200));
  bench.executor.Drain(bench.clock.Now() + absl::Seconds(60));
  EXPECT_TRUE(sent.results->final_status().ok()) << sent.results->final_status();
  EXPECT_EQ(Tokens(ServingBench::Read(*sent.results)).size(), 200u);
  EXPECT_TRUE(absl::IsUnavailable(bench.Send(TinyRequest({1})).refusal));
}

TEST(Executor, DrainEndsWhatTakesTooLong) {
  ServingBench bench({}, {.max_tokens = 1 << 20});
  bench.executor.Start();
  const auto sent = bench.Send(TinyRequest({1, 2}, 1 << 20));
  bench.executor.Drain(bench.clock.Now());
  EXPECT_TRUE(absl::IsUnavailable(sent.results->final_status()));
}

TEST(Executor, CancelsFromOtherThreadsEndEachCallOnce) {
  ServingBench bench;
  bench.executor.Start();
  std::mt19937 random(3);
  std::vector<ServingBench::Sent> sent;
  for (int i = 0; i < 60; ++i) {
    v1::PredictRequest request = TinyRequest({1, 2, 3}, 1 + static_cast<int>(random() % 40));
    if (i % 3 == 0) request = Explained(request);
    sent.push_back(bench.Send(request));
    if (i % 2 == 0) sent[random() % sent.size()].results->Cancel();
  }
  bench.executor.Drain(bench.clock.Now() + absl::Seconds(60));
  for (auto& call : sent) {
    int finished = 0;
    for (const auto& event : ServingBench::Read(*call.results)) finished += event.has_finished();
    EXPECT_EQ(finished, call.results->cancelled() ? 0 : 1);
  }
  EXPECT_EQ(Metric(bench, "mambascope_calls_in_flight"), 0);
  EXPECT_EQ(Metric(bench, "mambascope_queue_depth"), 0);
  EXPECT_EQ(bench.budget.free(), bench.budget.total());
}

}  // namespace
}  // namespace mambascope::serving
