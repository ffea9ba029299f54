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
#include "server/model/device.h"
#include "server/model/device_model.h"
#include "server/model/layer_trace.h"
#include "server/model/recurrent_state.h"
#include "server/model/weights.h"

namespace mambascope::model {

// Buffers of a forward pass, kept between passes so that nothing allocates per token. One per
// executor thread; grows to the largest pass seen.
struct Workspace {
  Array<float> h, u, xz, x, selective, dt, gated, y, out, head_rows, logits;
  Array<float> flipped_xz, flipped_gated, patches, embedded;  // Vim
  std::unique_ptr<DeviceWorkspace> device;  // of passes on a device, which use none of the above
};

// A piece of one sequence in a packed pass. Everything is borrowed until Forward returns.
struct Piece {
  std::span<const int32_t> tokens;  // the next tokens of the sequence, at least one; or
  std::span<const float> image;     // of image models, once: [3, image_size, image_size]; or
  // The stream that enters the first layer, of image models with the position added:
  // [rows, d_model]. Vim takes any number of rows, once.
  std::span<const float> embeddings;
  RecurrentState* state = nullptr;  // in: before the piece; out: after it. Of NewState
  SequenceTrace* trace = nullptr;   // appended to, if given
  // Rows of this piece, ascending, whose logits are wanted. Of a model that pools the mean only the
  // last, which stands for all rows of the sequence so far.
  std::span<const int32_t> logit_rows;
  std::vector<float>* logits = nullptr;  // out: [logit_rows, outputs]
  // Out: the first layer whose output was not finite (`layers` = the head), or -1. Such a piece's
  // results must not be used; the other pieces' are not touched by it.
  int32_t nonfinite_layer = -1;
};
// Rows that a piece takes in the pass.
inline int64_t RowsOf(const ModelConfig& config, const Piece& piece) {
  if (!piece.image.empty()) return config.vision.tokens();
  return static_cast<int64_t>(piece.tokens.size() + piece.embeddings.size() / config.d_model);
}

// A model as its equations (methods.md, section 1): a language model, or a classifier of texts or
// images. Prefill and single steps are the same pass: a step is a piece of one token. The bits of a
// piece's results depend on its own sequence alone, neither on the other pieces, nor on where the
// sequence was cut, nor on the number of threads. Threads: const and shareable; each concurrent
// Forward needs its own Workspace.
class MambaModel {
 public:
  // `folder`: config.json and model.safetensors or its shards. Errors name the file and the fault.
  // On a `device` that has memory of its own the weights lie there too; kResourceExhausted when it
  // is short.
  static absl::StatusOr<std::unique_ptr<const MambaModel>> Load(const std::string& folder,
                                                                const Device& device = {});

  // Before the first token, where the model runs. kResourceExhausted when a device's memory is
  // short.
  absl::StatusOr<RecurrentState> NewState() const;

  // Token ids must be in [0, vocabulary), images of the config's size (checked invariants). `stop`
  // is asked before each layer; once true, Forward returns kCancelled. On a device: also
  // kResourceExhausted, its memory is short, after which smaller passes go on; and what the driver
  // meets. After an error states, traces and logits are unspecified.
  absl::Status Forward(ThreadPool& pool, Workspace& workspace, std::span<Piece> pieces,
                       absl::FunctionRef<bool()> stop) const;

  // The same pass in parts, for a caller who lets others in between: its layers [begin, end). The
  // part from 0 begins the pass, the one to `layers` ends it with the logits. Between the parts
  // nobody else may use the workspace or the pieces. On a device the last part does all.
  absl::Status ForwardLayers(ThreadPool& pool, Workspace& workspace, std::span<Piece> pieces,
                             int32_t begin, int32_t end) const;

  // What enters the first layer: a piece's tokens or image as `embeddings`, on the host.
  // out [rows, d_model], its size checked.
  void Embed(ThreadPool& pool, std::span<const int32_t> tokens, std::span<const float> image,
             std::span<float> out) const;

  // The scan parameters of one layer for the first `tokens` tokens of a trace, for the
  // hidden-attention kernels: views into the trace, the weights and `buffers`, with the bits of the
  // pass. Mamba-2: one channel for each head, d_inner = heads; B and C are those of group 0, group
  // g's stand g d_state further.
  struct ScanBuffers {
    Array<float> delta;  // [tokens, d_inner]
    Array<float> A;      // Mamba-2: [d_state, heads]
  };
  kernels::ScanParameters ScanParametersOf(ThreadPool& pool, const SequenceTrace& trace,
                                           int32_t layer, int32_t direction, int64_t tokens,
                                           ScanBuffers& buffers) const;
  // The same with ReLU in place of softplus and no clamp (HA's simplified map).
  kernels::ScanParameters ReluScanParametersOf(ThreadPool& pool, const SequenceTrace& trace,
                                               int32_t layer, int32_t direction, int64_t tokens,
                                               ScanBuffers& buffers) const;

  const ModelConfig& config() const { return config_; }
  const Weights& weights() const { return *weights_; }  // on the host
  const Device& device() const { return device_; }

 private:
  MambaModel() = default;

  ModelConfig config_;
  Device device_;
  std::unique_ptr<const Weights> weights_;
  std::unique_ptr<const DeviceModel> on_device_;  // null on the CPU
};

}  // namespace mambascope::model
