#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/array.h"
#include "server/base/thread_pool.h"
#include "server/kernels/hidden_attention.h"
#include "server/model/config.h"
#include "server/model/layer_trace.h"
#include "server/model/recurrent_state.h"
#include "server/model/weights.h"

namespace mambascope::model {

// Buffers of a forward pass, kept between passes so that nothing allocates per token. One per
// executor thread; grows to the largest pass seen.
struct Workspace {
  Array<float> h, u, xz, x, x_dbl, dt, gated, y, out, head_rows, logits;
};

// A piece of one sequence in a packed pass. Everything is borrowed until Forward returns.
struct Piece {
  std::span<const int32_t> tokens;       // the next tokens of the sequence, at least one
  RecurrentState* state = nullptr;       // in: before the piece; out: after it
  SequenceTrace* trace = nullptr;        // appended to, if given
  std::span<const int32_t> logit_rows;   // rows of this piece, ascending, whose logits are wanted
  std::vector<float>* logits = nullptr;  // out: [logit_rows, vocabulary]
  // Out: the first layer whose output was not finite (`layers` = the head), or -1. Such a piece's
  // results must not be used; the other pieces' are not touched by it.
  int32_t nonfinite_layer = -1;
};

// A language model as its equations (methods.md, section 1; Mamba, arXiv 2312.00752). Prefill and
// single steps are the same pass: a step is a piece of one token. The bits of a piece's results
// depend on its own sequence alone, neither on the other pieces, nor on where the sequence was cut,
// nor on the number of threads. Threads: const and shareable; each concurrent Forward needs its own
// Workspace.
class MambaModel {
 public:
  // `folder`: config.json and model.safetensors. Errors name the file and the fault.
  static absl::StatusOr<std::unique_ptr<const MambaModel>> Load(const std::string& folder);

  // Token ids must be in [0, vocabulary) (checked invariant). `stop` is asked before each layer;
  // once true, Forward returns kCancelled and states, traces and logits are unspecified.
  absl::Status Forward(ThreadPool& pool, Workspace& workspace, std::span<Piece> pieces,
                       absl::FunctionRef<bool()> stop) const;

  // The scan parameters of one layer for the first `tokens` tokens of a trace, for the
  // hidden-attention kernels: views into the trace and the weights, and `delta` [tokens, d_inner],
  // which is recomputed into `delta` with the bits of the pass.
  kernels::ScanParameters ScanParametersOf(ThreadPool& pool, const SequenceTrace& trace,
                                           int32_t layer, int64_t tokens,
                                           Array<float>& delta) const;
  // The same with ReLU in place of softplus (HA's simplified map).
  kernels::ScanParameters ReluScanParametersOf(ThreadPool& pool, const SequenceTrace& trace,
                                               int32_t layer, int64_t tokens,
                                               Array<float>& delta) const;

  const ModelConfig& config() const { return config_; }
  const Weights& weights() const { return *weights_; }

 private:
  MambaModel() = default;

  ModelConfig config_;
  std::unique_ptr<const Weights> weights_;
};

}  // namespace mambascope::model
