// The logit lens: what final norm and head would say of the stream that leaves each layer
// (methods.md, section 5). The last layer's is the model's output.
#include <algorithm>
#include <memory>

#include "server/base/status.h"
#include "server/explain/latim_target.h"
#include "server/explain/lens_head.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/explain/stream_steps.h"
#include "server/kernels/rms_norm.h"
#include "server/model/stream_walk.h"

namespace mambascope::explain {
namespace {

constexpr absl::string_view kName = "logit_lens";

struct Setup {
  Setup(const v1::Explanation& explanation, const model::ModelConfig& config, int64_t tokens)
      : layers(LayersOf(explanation.logit_lens().layers(), config)),
        positions(explanation.logit_lens().positions().begin(),
                  explanation.logit_lens().positions().end()),
        head(config, LensTop(explanation.logit_lens().top(), config), /*biased=*/true),
        stream_stride(model::SequenceTrace::StreamStride(config, tokens)) {
    if (positions.empty()) {
      // Where the mean is pooled every row answers: the last one stands for them.
      const int64_t end = TargetRowsOf(explanation, config, tokens).end();
      positions.push_back(static_cast<int32_t>(end - 1));
    }
    const int32_t last = *std::max_element(positions.begin(), positions.end());
    prefix = ReadTokens(config, last, tokens);
    for (const int32_t layer : layers) leaving.push_back(layer + 1);
  }

  std::vector<int32_t> layers, leaving;  // a layer's output enters the next one
  std::vector<int32_t> positions;
  LensHead head;
  int32_t stream_stride;
  int64_t prefix = 0;
};

class Explainer : public Explaining {
 public:
  Explainer(const v1::Explanation& options, const Subject& subject)
      : subject_(subject),
        setup_(options, subject.model->config(), subject.tokens),
        walk_(*subject.model, *subject.trace, setup_.prefix, setup_.stream_stride) {}

  absl::Status Step(TensorWriter& writer) override {
    if (visit_ == setup_.layers.size()) return absl::OkStatus();
    const int32_t layer = setup_.layers[visit_];
    if (!walk_.Prepare(*subject_.pool, layer + 1)) return absl::OkStatus();
    const auto cells = static_cast<int64_t>(setup_.positions.size());
    const int64_t count = std::min(setup_.head.CellsPerSlice(), cells - read_);
    const int64_t d_model = subject_.model->config().d_model;
    rows_.Reserve(count * d_model);
    for (int64_t r = 0; r < count; ++r) {
      std::copy_n(walk_.Entering(layer + 1) + setup_.positions[read_ + r] * d_model, d_model,
                  rows_.data() + r * d_model);
    }
    kernels::RmsNorm(*subject_.pool, rows_.data(), subject_.model->weights().views().norm_f,
                     subject_.model->config().norm_eps, count, d_model, rows_.data());
    RETURN_IF_ERROR(setup_.head.Read(subject_, kName, layer, rows_.data(), count));
    read_ += count;
    if (read_ < cells) return absl::OkStatus();
    setup_.head.Write(writer, kName);
    read_ = 0;
    ++visit_;
    return absl::OkStatus();
  }

  // Nothing here is measured against something else.
  v1::Quality quality() const override {
    v1::Quality quality;
    quality.set_within_tolerance(true);
    return quality;
  }

  // What leaves the last layer is always recorded.
  static int32_t Recomputed(const Setup& setup, const model::ModelConfig& config) {
    std::vector<int32_t> walked = setup.leaving;
    if (walked.back() == config.layers) walked.pop_back();
    return RecomputedLayers(walked, setup.stream_stride);
  }

 private:
  const Subject subject_;
  Setup setup_;
  model::StreamWalk walk_;
  size_t visit_ = 0;
  int64_t read_ = 0;  // cells of the layer
  Array<float> rows_;
};

class LogitLens : public Method {
 public:
  absl::string_view name() const override { return kName; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, const std::string& field, Violations& violations) const override {
    const v1::LogitLens& options = explanation.logit_lens();
    CheckLogitTarget(explanation, field, violations);
    CheckLayers(options.layers(), config, field, violations);
    CheckIndices(options.positions(), static_cast<int32_t>(tokens), kMaxLensPositions,
                 field + ".positions", violations);
    CheckLensTop(options.top(), config, field, violations);
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const Setup setup(explanation, config, tokens);
    const auto cells = static_cast<int64_t>(setup.positions.size());
    const auto layers = static_cast<int64_t>(setup.layers.size());
    const int32_t recomputed = Explainer::Recomputed(setup, config);
    Plan plan;
    plan.tensors = LensTensors(kName, setup.layers, {"positions", cells, setup.positions},
                               LensTop(explanation.logit_lens().top(), config), dtype);
    plan.streams = true;
    plan.slices = layers * setup.head.Slices(cells) + recomputed;
    constexpr int64_t kLists = 4096;  // of layers and positions, and their owners
    plan.memory_bytes = kLists + 8 * (layers + cells) + setup.head.MemoryBytes(cells) +
                        4 * std::min(cells, setup.head.CellsPerSlice()) * config.d_model +
                        model::StreamWalk::MemoryBytes(config, setup.prefix, setup.stream_stride);
    plan.work.gemm = static_cast<double>(layers * cells) * config.outputs() * config.d_model;
    plan.work.forward_tokens = static_cast<double>(recomputed * setup.prefix) / config.layers;
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(options, subject);
  }
};

}  // namespace

std::unique_ptr<const Method> NewLogitLens() { return std::make_unique<LogitLens>(); }

}  // namespace mambascope::explain
