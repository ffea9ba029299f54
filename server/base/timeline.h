#pragma once

#include "absl/time/time.h"

namespace mambascope {

// When the phases of one call happened; every duration that metrics, logs and events state is read
// from here, so that they agree. Written by whoever owns the call at the time.
struct Timeline {
  absl::Time arrival = absl::InfinitePast();   // the request was complete
  absl::Time queued = absl::InfinitePast();    // accepted into the queue
  absl::Time started = absl::InfinitePast();   // left the queue
  absl::Time finished = absl::InfinitePast();  // its end was decided
  absl::Duration tokenize;                     // spent in each phase, without waiting
  absl::Duration prefill;                      // passes that held a piece of its prompt
  absl::Duration decode;                       // passes that held one of its steps
  absl::Duration explain;

  absl::Duration queue() const {
    return started > queued && queued > absl::InfinitePast() ? started - queued
                                                             : absl::ZeroDuration();
  }
  absl::Duration total() const { return finished - arrival; }
};

}  // namespace mambascope
