#include "server/explain/embedded_pass.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/model/mamba_block.h"

namespace mambascope::explain {

EmbeddedPass::EmbeddedPass(const Subject& subject, int32_t stream_stride)
    : subject_([&] {
        Subject read = subject;
        read.tokens = ReadTokens(subject.model->config(), subject.position, subject.tokens);
        return read;
      }()),
      stream_stride_(stream_stride) {
  if (subject.model->config().mean_pooled()) {
    rows_ = {static_cast<int32_t>(subject_.tokens - 1)};
  } else {
    for (const Output& output : subject_.outputs) rows_.push_back(output.position);
  }
}

absl::Status EmbeddedPass::Begin(std::span<const float> embeddings) {
  const model::ModelConfig& config = subject_.model->config();
  ASSIGN_OR_RETURN(model::RecurrentState state, subject_.model->NewState());
  state_.emplace(std::move(state));
  if (stream_stride_ > 0) {
    trace_.emplace(model::SequenceTrace::StreamsOnly(config, subject_.tokens, stream_stride_));
  }
  piece_ = {};
  piece_.embeddings = embeddings;
  piece_.state = &*state_;
  piece_.trace = trace_.has_value() ? &*trace_ : nullptr;
  piece_.logit_rows = rows_;
  piece_.logits = &logits_;
  layer_ = 0;
  return absl::OkStatus();
}

absl::Status EmbeddedPass::Step() {
  RETURN_IF_ERROR(subject_.model->ForwardLayers(*subject_.pool, workspace_, std::span(&piece_, 1),
                                                layer_, layer_ + 1));
  ++layer_;
  if (!done()) return absl::OkStatus();
  if (piece_.nonfinite_layer >= 0) {
    return absl::InternalError(absl::StrCat(
        "a pass over other embeddings is not finite from layer ", piece_.nonfinite_layer, " on"));
  }
  value_ = ValueOf(subject_, logits_);
  return absl::OkStatus();
}

int64_t EmbeddedPass::MemoryBytes(const model::ModelConfig& config, int64_t tokens,
                                  int32_t stream_stride) {
  const int64_t a_token = model::BlockFloats(config, /*traced=*/stream_stride > 0);
  return 4 * (tokens * a_token + 2 * config.outputs()) + model::RecurrentState::Bytes(config) +
         (stream_stride > 0 ? model::SequenceTrace::StreamsOnlyBytes(config, tokens, stream_stride)
                            : 0);
}

}  // namespace mambascope::explain
