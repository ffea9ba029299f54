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

namespace {

// The waiting prompts in the order in which they share a pass.
std::vector<size_t> SharingOrder(std::span<const SequenceNeed> needs) {
  std::vector<size_t> order;
  for (size_t i = 0; i < needs.size(); ++i) {
    if (needs[i].remaining > 0) order.push_back(i);
  }
  if (order.empty()) return order;
  std::stable_sort(order.begin() + 1, order.end(),
                   [&](size_t a, size_t b) { return needs[a].position < needs[b].position; });
  return order;
}

// The piece that follows the first `taken` tokens of what a prompt needs; 0 at its end.
int64_t NextPiece(const SequenceNeed& need, int64_t taken) {
  const int64_t left = need.remaining - taken;
  if (need.whole) return left;
  return std::min(left, kPieceTokens - (need.position + taken) % kPieceTokens);
}

}  // namespace

std::vector<int64_t> PlanPass(std::span<const SequenceNeed> needs, int32_t max_batch_tokens) {
  std::vector<int64_t> tokens(needs.size(), 0);
  int64_t left = max_batch_tokens;
  for (size_t i = 0; i < needs.size(); ++i) {
    if (needs[i].remaining > 0) continue;
    tokens[i] = 1;
    --left;
  }
  const std::vector<size_t> order = SharingOrder(needs);
  // A pass full of steps must not starve prompts, nor an image that is larger than a pass.
  bool first = true, given = true;
  while (given) {
    given = false;
    for (const size_t i : order) {
      const int64_t piece = NextPiece(needs[i], tokens[i]);
      if (piece == 0 || (piece > left && !first)) continue;
      tokens[i] += piece;
      left -= piece;
      given = true;
      first = false;
    }
  }
  return tokens;
}

}  // namespace mambascope::serving
