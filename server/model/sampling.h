#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace mambascope::model {

struct SamplingOptions {
  float temperature = 0;  // 0: the most probable token
  float top_p = 1;
  int32_t top_k = 0;  // 0: all
};

// The token that follows, from logits [vocabulary] (finite). Greedy ties go to the lower id. Draws
// one number from `random` when temperature > 0 and none otherwise, so that the same seed gives the
// same tokens on every machine whose logits agree.
int32_t SampleToken(std::span<const float> logits, const SamplingOptions& options,
                    std::mt19937_64& random);

// log softmax(logits)[token], accumulated in double.
float LogProbability(std::span<const float> logits, int32_t token);

struct RankedToken {
  int32_t id;
  float log_probability;
};
// The k most probable, best first; ties to the lower id.
std::vector<RankedToken> TopTokens(std::span<const float> logits, int32_t k);

}  // namespace mambascope::model
