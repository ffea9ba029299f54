#include "server/explain/gradient_walk.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/explain/method.h"
#include "server/model/finite.h"

namespace mambascope::explain {
namespace {

using kernels::BackwardRule;

bool Same(const std::vector<Output>& a, const std::vector<Output>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Output& x, const Output& y) {
    return x.position == y.position && x.token == y.token && x.contrast == y.contrast;
  });
}

// What the head's bias contributes to f.
double HeadBias(const Subject& subject) {
  const float* bias = subject.model->weights().views().head_bias;
  double sum = 0;
  for (const Output& output : subject.outputs) {
    if (bias == nullptr) continue;
    sum += bias[output.token];
    if (output.contrast >= 0) sum -= bias[output.contrast];
  }
  return sum;
}

Subject OfReadTokens(Subject subject) {
  subject.tokens = ReadTokens(subject.model->config(), subject.position, subject.tokens);
  return subject;
}

}  // namespace

int64_t GradientResult::Bytes(const model::ModelConfig& config, int64_t tokens) {
  return 4 * tokens * (config.d_model + 2 * config.layers);
}

const GradientCache::Entry* GradientCache::Look(const Subject& subject, BackwardRule rule) const {
  for (const Entry& entry : entries_) {
    if (entry.rule == rule && entry.value == subject.value &&
        Same(entry.outputs, subject.outputs)) {
      return &entry;
    }
  }
  return nullptr;
}

std::shared_ptr<const GradientResult> GradientCache::Find(const Subject& subject,
                                                          BackwardRule rule) const {
  const Entry* entry = Look(subject, rule);
  return entry == nullptr ? nullptr : entry->result;
}

void GradientCache::Keep(const Subject& subject, BackwardRule rule,
                         std::shared_ptr<const GradientResult> result) {
  // One entry: the estimate counts one, and methods of one target usually stand together.
  entries_.clear();
  entries_.push_back({subject.outputs, subject.value, rule, std::move(result)});
}

GradientWalk::GradientWalk(Subject subject, BackwardRule rule, int32_t planned_stride)
    : subject_(OfReadTokens(std::move(subject))),
      rule_(rule),
      layer_(subject_.model->config().layers - 1),
      walk_(*subject_.model, *subject_.trace, subject_.tokens, planned_stride) {
  if (subject_.gradients != nullptr) result_ = subject_.gradients->Find(subject_, rule);
}

int32_t GradientWalk::Slices(const model::ModelConfig& config, int32_t stream_stride) {
  return config.layers + model::StreamWalk::Recomputed(config, stream_stride);
}

int64_t GradientWalk::MemoryBytes(const model::ModelConfig& config, int64_t tokens,
                                  int32_t stream_stride, BackwardRule rule) {
  return 2 * GradientResult::Bytes(config, tokens) + 4 * tokens * config.d_model +
         model::StreamWalk::MemoryBytes(config, tokens, stream_stride) +
         model::LayerActivationsBytes(config, tokens) +
         model::LayerGradientBytes(config, tokens, static_cast<int>(kPlannedThreads), rule);
}

double GradientWalk::ForwardTokens(const model::ModelConfig& config, int64_t tokens,
                                   int32_t stream_stride) {
  const double recomputed = model::StreamWalk::Recomputed(config, stream_stride);
  return static_cast<double>(tokens) * (2.2 + recomputed / config.layers);
}

absl::Status GradientWalk::Step() {
  if (done()) return absl::OkStatus();
  const model::ModelConfig& config = subject_.model->config();
  if (pending_ == nullptr) {
    pending_ = std::make_shared<GradientResult>();
    pending_->tokens = subject_.tokens;
    pending_->gated_mean.resize(subject_.tokens * config.layers);
    pending_->stream_peak.resize(subject_.tokens * config.layers);
    if (rule_ == BackwardRule::kRelevance) pending_->bias_relevance = HeadBias(subject_);
    stream_gradient_ = Array<float>(subject_.tokens * config.d_model);
    SeedGradient(subject_, walk_.Entering(config.layers), rule_ == BackwardRule::kRelevance,
                 stream_gradient_.data());
  }
  if (!walk_.Prepare(*subject_.pool, layer_)) return absl::OkStatus();
  return RunLayer();
}

absl::Status GradientWalk::RunLayer() {
  const model::ModelConfig& config = subject_.model->config();
  const int64_t tokens = subject_.tokens, d_model = config.d_model, d_inner = config.d_inner;
  float* peak = pending_->stream_peak.data() + layer_ * tokens;
  for (int64_t j = 0; j < tokens; ++j) {
    const float* row = stream_gradient_.data() + j * d_model;
    peak[j] = std::max(0.0f, *std::max_element(row, row + d_model));
  }
  const float* stream = walk_.Entering(layer_);
  model::RunLayerOnce(*subject_.pool, *subject_.model, layer_, stream, tokens,
                      model::LayerParts::kAll, activations_);
  pending_->bias_relevance +=
      model::RunLayerBackward(*subject_.pool, *subject_.model, layer_, stream, activations_, rule_,
                              gradient_, stream_gradient_.data());
  float* mean = pending_->gated_mean.data() + layer_ * tokens;
  for (int64_t j = 0; j < tokens; ++j) {
    const float* row = gradient_.gated.data() + j * d_inner;
    double sum = 0;
    for (int64_t d = 0; d < d_inner; ++d) sum += row[d];
    mean[j] = static_cast<float>(sum / static_cast<double>(d_inner));
  }
  if (!model::AllFinite(*subject_.pool, stream_gradient_.data(), tokens * d_model)) {
    return absl::InternalError(absl::StrCat("the gradient is not finite from layer ", layer_,
                                            " of ", config.layers, " down"));
  }
  if (layer_-- == 0) Keep();
  return absl::OkStatus();
}

void GradientWalk::Keep() {
  pending_->embeddings.assign(stream_gradient_.begin(), stream_gradient_.end());
  result_ = std::move(pending_);
  if (subject_.gradients != nullptr) subject_.gradients->Keep(subject_, rule_, result_);
}

std::vector<float> TimesEmbeddings(const Subject& subject, const GradientResult& result) {
  const int64_t d_model = subject.model->config().d_model;
  std::vector<float> embeddings(subject.tokens * d_model);
  subject.model->Embed(*subject.pool,
                       subject.token_ids.first(subject.image.empty() ? subject.tokens : 0),
                       subject.image, embeddings);
  std::vector<float> scores(subject.tokens, 0);
  for (int64_t j = 0; j < result.tokens; ++j) {
    double sum = 0;
    for (int64_t m = 0; m < d_model; ++m) {
      sum += double{embeddings[j * d_model + m]} * result.embeddings[j * d_model + m];
    }
    scores[j] = static_cast<float>(sum);
  }
  return scores;
}

}  // namespace mambascope::explain
