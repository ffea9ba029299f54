#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mambascope/v1/explanation.pb.h"
#include "server/base/thread_pool.h"
#include "server/model/layer_trace.h"
#include "server/model/mamba_model.h"

namespace mambascope::explain {

// One explained logit: of `token` (a class of classifiers) after `position`, less the contrast's.
struct Output {
  int32_t position = 0;
  int32_t token = 0;
  int32_t contrast = -1;  // none
};

class GradientCache;

// What a method is asked about: one sequence's finished forward pass and the target in it. Borrowed
// for the life of the Explaining.
struct Subject {
  const model::MambaModel* model = nullptr;
  const model::SequenceTrace* trace = nullptr;  // holds at least `tokens` tokens
  ThreadPool* pool = nullptr;
  int32_t position = 0;  // the target's; of a span the last
  int64_t tokens = 0;    // of the explained input: the trace may go on
  // The input: [tokens] or an image [3, S, S].
  std::span<const int32_t> token_ids;
  std::span<const float> image;
  // f is the sum over these, one but for spans of generated tokens.
  std::vector<Output> outputs;
  v1::OutputValue value = v1::OUTPUT_VALUE_LOGIT;  // never UNSPECIFIED
  double explained = 0;                            // f as the forward pass gave it
  GradientCache* gradients = nullptr;              // of the request, shared; may be null
  int32_t padding_token = -1;                      // the vocabulary's, or its end of text; -1: none
};

// How much row i counts where "the target's row" is meant: 1 at its position; the mean over the
// positions of a span; the mean over all rows of a classifier that pools the mean. [tokens]
std::vector<float> RowWeights(const Subject& subject);

// Tokens that the target can have read: those up to it, or all (Vim, mean pooling).
int64_t ReadTokens(const model::ModelConfig& config, int64_t position, int64_t tokens);

// The gradient of f by the stream that leaves the last layer, through final norm and head:
// out [tokens, d_model], zero where f does not read. `frozen_norm`: the norm's scale counts as a
// constant. `last_stream` [tokens, d_model].
void SeedGradient(const Subject& subject, const float* last_stream, bool frozen_norm, float* out);

// f for a forward pass's logits, [outputs.size(), vocabulary or classes]: one row for each output.
double ValueOf(const Subject& subject, std::span<const float> logits);

}  // namespace mambascope::explain
