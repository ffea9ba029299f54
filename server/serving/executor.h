#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/base/thread_pool.h"
#include "server/model/mamba_model.h"
#include "server/observe/metrics.h"
#include "server/serving/batcher.h"
#include "server/serving/call.h"
#include "server/serving/completion.h"

namespace mambascope::serving {

struct ExecutorOptions {
  BatchLimits batch = {};
  int32_t max_queue = 256;  // calls waiting for their first pass
};

// Runs admitted calls, on one thread: turn by turn, one packed forward pass for each model with
// sequences in prefill or decoding (they join and leave between passes), then one slice of one
// explanation. A call that was cancelled or has expired is dropped before each turn, and a pass
// whose calls have all gone stops before its next layer.
//
// Calls are taken over by Submit and always end through Completion, once.
class Executor {
 public:
  // Borrows everything.
  Executor(ThreadPool* pool, observe::Metrics* metrics, const Completion* completion,
           const Clock* clock, const ExecutorOptions& options);
  ~Executor();  // ends what is left with kUnavailable

  // Starts the thread. Tests do without it and call Turn themselves.
  void Start();

  // Queues the call and sends its `started` event, or refuses it (kResourceExhausted, kUnavailable)
  // and leaves it to the caller. Any thread.
  absl::Status Submit(std::unique_ptr<Call>& call);
  // Something changed for a call (room in its stream, its reader left). Any thread, never blocks
  // long.
  void Wake();

  // Refuses new calls, lets those taken run until `limit`, then ends them with kUnavailable.
  // Returns when none is left. Any thread but the executor's.
  void Drain(absl::Time limit);

  // One turn. False if there was nothing to do; then `look_again` says until when.
  bool Turn(absl::Time* look_again);

 private:
  struct Running;

  void Loop();
  void TakeWaiting(absl::Time* look_again);
  void DropEnded(absl::Time* look_again);
  bool RunPasses();
  void RunPass(const ServedModel& served, std::vector<Running*>& sequences);
  void Deliver(Running& running, const model::Piece& piece, absl::Duration spent);
  void SendPrediction(Running& running, std::span<const float> logits);
  void SendLogits(Running& running, std::span<const float> logits);
  bool RunSlice();
  void RemoveFinished();
  void End(Running& running, const absl::Status& status);
  absl::Status EndReason(const Call& call) const;

  ThreadPool* const pool_;
  observe::Metrics* const metrics_;
  const Completion* const completion_;
  const Clock* const clock_;
  const ExecutorOptions options_;

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Call>> queue_;  // this and the next five guarded by mu_
  int32_t submitting_ = 0;                   // slots of the queue taken by Submits under way
  bool woken_ = false;
  bool draining_ = false;
  bool stopping_ = false;
  bool idle_ = true;  // nothing queued, running or being submitted

  std::atomic<bool> aborting_{false};  // every call ends

  // The executor's thread only.
  model::Workspace workspace_;
  std::list<std::unique_ptr<Running>> running_;  // in the order of arrival
  Call* last_sliced_ = nullptr;                  // whose explanation had the last slice
  std::thread thread_;
};

}  // namespace mambascope::serving
