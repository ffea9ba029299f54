#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace mambascope {

// The time that deadlines and stamps are read from; tests put a FakeClock in its place.
// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;

  static const Clock& Real();
};

}  // namespace mambascope
