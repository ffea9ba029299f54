#pragma once

#include <mutex>

#include "server/base/clock.h"

namespace mambascope {

// Time that moves only when a test says so. Thread-safe.
class FakeClock : public Clock {
 public:
  absl::Time Now() const override {
    std::lock_guard lock(mu_);
    return now_;
  }
  void Advance(absl::Duration by) {
    std::lock_guard lock(mu_);
    now_ += by;
  }

 private:
  mutable std::mutex mu_;
  absl::Time now_ = absl::FromUnixSeconds(1'800'000'000);
};

}  // namespace mambascope
