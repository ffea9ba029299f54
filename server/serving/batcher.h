#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/time/time.h"

namespace mambascope::serving {

// Policies of the queue and of packed passes: pure functions from a snapshot to a decision.

struct BatchLimits {
  int32_t max_batch_tokens =
      512;                   // of one forward pass, so that nobody waits longer than that takes
  int32_t max_running = 64;  // sequences at once
  absl::Duration max_queue_delay = absl::ZeroDuration();
};

// ---- which waiting calls enter ----

struct WaitingCall {
  absl::Time queued;
  int64_t tokens = 0;
};
struct QueueDecision {
  int32_t take = 0;                                // from the front
  absl::Time look_again = absl::InfiniteFuture();  // when nothing else happens before
};
// Calls enter at once while something runs anyway (the pass costs little more with them) or once
// enough tokens wait for a full pass; else when the oldest has waited max_queue_delay for company.
QueueDecision DecideQueue(std::span<const WaitingCall> waiting, int32_t running, absl::Time now,
                          const BatchLimits& limits);

// ---- what the next pass holds ----

struct SequenceNeed {
  int64_t position = 0;   // tokens already computed
  int64_t remaining = 0;  // of the prompt; 0: one decoding step
  bool whole = false;     // an image: both its scans need all of it at once
};
// Tokens of each sequence in the next pass (0 = not in it), at most max_batch_tokens in all but for
// one token each for the decoding ones, which never wait, and for an image that comes first.
// Prompts are cut only at absolute multiples of kPieceTokens and share the pass piece by piece: the
// oldest first, so that it never starves, then those that had least so far, so that a short prompt
// never waits for a long one.
inline constexpr int64_t kPieceTokens = 64;
std::vector<int64_t> PlanPass(std::span<const SequenceNeed> needs, int32_t max_batch_tokens);

}  // namespace mambascope::serving
