#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "server/base/array.h"
#include "server/explain/subject.h"
#include "server/kernels/backward_rule.h"
#include "server/model/layer_gradient.h"
#include "server/model/stream_walk.h"

namespace mambascope::explain {

// The gradient of f (or its MambaLRP form) by what enters the first layer, and on the way what
// other methods read of it. Of the tokens that the target can have read; later ones have none.
struct GradientResult {
  int64_t tokens = 0;
  std::vector<float> embeddings;   // [tokens, d_model] df/de
  std::vector<float> gated_mean;   // [layers, tokens] mean over d_inner of df/dgated
  std::vector<float> stream_peak;  // [layers, tokens] max over d_model of (df/dh)^+, h leaving the
                                   // layer
  double bias_relevance = 0;       // MambaLRP: what biases of layers and head took

  static int64_t Bytes(const model::ModelConfig& config, int64_t tokens);
};

// The results of one request by target and rule, so that its methods share one backward pass per
// target. Used by one thread.
class GradientCache {
 public:
  std::shared_ptr<const GradientResult> Find(const Subject& subject,
                                             kernels::BackwardRule rule) const;
  void Keep(const Subject& subject, kernels::BackwardRule rule,
            std::shared_ptr<const GradientResult> result);

 private:
  struct Entry {
    std::vector<Output> outputs;
    v1::OutputValue value;
    kernels::BackwardRule rule;
    std::shared_ptr<const GradientResult> result;
  };
  const Entry* Look(const Subject& subject, kernels::BackwardRule rule) const;
  std::vector<Entry> entries_;
};

// A backward pass over a trace with streams, layer by layer from the last (methods.md, section 6).
// Activations are computed again layer by layer, so that memory is that of one layer and of the
// recorded streams. Owned and stepped by one thread; borrows the subject's parts.
class GradientWalk {
 public:
  // `planned_stride`: what Slices was asked with.
  GradientWalk(Subject subject, kernels::BackwardRule rule, int32_t planned_stride);

  // Slices of a whole walk: one for each layer and each recomputed one. Step must be called that
  // often; with a result from the cache each does nothing.
  static int32_t Slices(const model::ModelConfig& config, int32_t stream_stride);
  static int64_t MemoryBytes(const model::ModelConfig& config, int64_t tokens,
                             int32_t stream_stride, kernels::BackwardRule rule);
  // Tokens through the layers that it costs, as Work::forward_tokens.
  static double ForwardTokens(const model::ModelConfig& config, int64_t tokens,
                              int32_t stream_stride);

  absl::Status Step();
  bool done() const { return result_ != nullptr; }
  const GradientResult& result() const { return *result_; }

 private:
  absl::Status RunLayer();
  void Keep();

  Subject subject_;  // its tokens are those that the target can have read
  const kernels::BackwardRule rule_;
  int32_t layer_;  // next to go through
  model::StreamWalk walk_;
  model::LayerActivations activations_;
  model::LayerGradient gradient_;
  Array<float> stream_gradient_;  // [tokens, d_model]
  std::shared_ptr<GradientResult> pending_;
  std::shared_ptr<const GradientResult> result_;
};

// sum_m e_jm g_jm for each token, zeros from `result.tokens` on; [tokens].
std::vector<float> TimesEmbeddings(const Subject& subject, const GradientResult& result);

}  // namespace mambascope::explain
