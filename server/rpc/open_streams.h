#pragma once

#include <condition_variable>
#include <mutex>

#include "absl/time/time.h"

namespace mambascope::rpc {

// Counts the Predict streams that gRPC still holds, so that a shutdown can wait until the last
// events are out. Threads: any.
class OpenStreams {
 public:
  void Enter() {
    std::lock_guard lock(mu_);
    ++count_;
  }
  void Leave() {
    std::lock_guard lock(mu_);
    if (--count_ == 0) none_.notify_all();  // under the lock: the waiter may destroy this
  }
  // False if some are left at `deadline`.
  bool WaitUntilNone(absl::Time deadline) {
    std::unique_lock lock(mu_);
    return none_.wait_until(lock, absl::ToChronoTime(deadline), [this] { return count_ == 0; });
  }

 private:
  std::mutex mu_;
  std::condition_variable none_;
  int count_ = 0;
};

}  // namespace mambascope::rpc
