#include "server/serving/batcher.h"

#include <algorithm>

namespace mambascope::serving {

QueueDecision DecideQueue(std::span<const WaitingCall> waiting, int32_t running, absl::Time now,
                          const BatchLimits& limits) {
  QueueDecision decision;
  const auto free = static_cast<size_t>(std::max(limits.max_running - running, 0));
  if (waiting.empty() || free == 0) return decision;
  int64_t tokens = 0;
  for (const WaitingCall& call : waiting) tokens += call.tokens;
  const absl::Time patience = waiting.front().queued + limits.max_queue_delay;
  if (running == 0 && tokens < limits.max_batch_tokens && now < patience) {
    decision.look_again = patience;
    return decision;
  }
  decision.take = static_cast<int32_t>(std::min(waiting.size(), free));
  return decision;
}

std::vector<int64_t> PlanPass(std::span<const SequenceNeed> needs, int32_t max_batch_tokens) {
  std::vector<int64_t> tokens(needs.size(), 0);
  int64_t left = max_batch_tokens;
  for (size_t i = 0; i < needs.size(); ++i) {
    if (needs[i].remaining > 0) continue;
    tokens[i] = 1;
    --left;
  }
  for (size_t i = 0; i < needs.size() && left > 0; ++i) {
    if (needs[i].remaining <= 0) continue;
    if (needs[i].remaining <= left) {
      tokens[i] = needs[i].remaining;
    } else {
      const int64_t end = (needs[i].position + left) / kPieceTokens * kPieceTokens;
      tokens[i] = std::max<int64_t>(end - needs[i].position, 0);
    }
    left -= tokens[i];
  }
  // A pass full of steps must not starve prompts: the first one gets a piece all the same.
  const auto waits = [&](size_t i) { return needs[i].remaining > 0; };
  bool any = false;
  for (size_t i = 0; i < needs.size(); ++i) any = any || (waits(i) && tokens[i] > 0);
  for (size_t i = 0; i < needs.size() && !any; ++i) {
    if (!waits(i)) continue;
    tokens[i] = std::min(needs[i].remaining, kPieceTokens - needs[i].position % kPieceTokens);
    any = true;
  }
  return tokens;
}

}  // namespace mambascope::serving
