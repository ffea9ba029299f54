// The edge lens: the head on what one token contributes to the target's row of a layer (methods.md,
// section 5). Its value at the target is that contribution's part of the logit (ALTI-Logit, arXiv
// 2305.12535), so over all layers and tokens the edges sum to the logit less what embedding and
// biases give.
#include <algorithm>
#include <cmath>
#include <memory>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/explain/latim_layer.h"
#include "server/explain/latim_target.h"
#include "server/explain/lens_head.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/explain/stream_steps.h"
#include "server/kernels/gemm.h"
#include "server/model/stream_walk.h"

namespace mambascope::explain {
namespace {

constexpr absl::string_view kName = "edge_lens";

struct Setup {
  Setup(const v1::Explanation& explanation, const model::ModelConfig& config, int64_t tokens)
      : layers(LayersOf(explanation.edge_lens().layers(), config)),
        sources(explanation.edge_lens().sources().begin(), explanation.edge_lens().sources().end()),
        head(config, LensTop(explanation.edge_lens().top(), config), /*biased=*/false),
        target(TargetRowsOf(explanation, config, tokens)),
        prefix(ReadTokens(config, target.end() - 1, tokens)),
        layer(config, v1::Latim::ACTIVATION_GATE, prefix),
        stream_stride(model::SequenceTrace::StreamStride(config, tokens)) {
    if (sources.empty()) sources.push_back(static_cast<int32_t>(target.end() - 1));
  }

  int64_t BlockAt(int64_t row) const { return layer.BlockRows(target.end() - row); }
  int64_t blocks() const {
    int64_t blocks = 0;
    for (int64_t row = target.first; row < target.end(); row += BlockAt(row)) ++blocks;
    return blocks;
  }
  int64_t cells() const { return static_cast<int64_t>(sources.size()); }

  std::vector<int32_t> layers, sources;
  LensHead head;
  RowRange target;  // one row, but where the mean is pooled
  int64_t prefix;
  LatimLayer layer;
  int32_t stream_stride;
};

class Explainer : public Explaining {
 public:
  Explainer(const v1::Explanation& options, const Subject& subject)
      : subject_(subject),
        setup_(options, subject.model->config(), subject.tokens),
        walk_(*subject.model, *subject.trace, setup_.prefix, setup_.stream_stride),
        scale_(FinalScales()),
        edges_(setup_.cells() * config().d_model) {}

  absl::Status Step(TensorWriter& writer) override {
    if (visit_ == setup_.layers.size()) return absl::OkStatus();
    const int32_t layer = setup_.layers[visit_];
    if (next_row_ < 0) {
      if (!walk_.Prepare(*subject_.pool, layer)) return absl::OkStatus();
      setup_.layer.Open(subject_, layer, walk_.Entering(layer));
      inputs_.Reserve(setup_.cells() * config().d_inner);
      std::fill_n(inputs_.data(), setup_.cells() * config().d_inner, 0.0f);
      next_row_ = setup_.target.first;
      return absl::OkStatus();
    }
    if (next_row_ < setup_.target.end()) {
      AddRows();
      return absl::OkStatus();
    }
    const int64_t count = std::min(setup_.head.CellsPerSlice(), setup_.cells() - read_);
    RETURN_IF_ERROR(
        setup_.head.Read(subject_, kName, layer, edges_.data() + read_ * config().d_model, count));
    read_ += count;
    if (read_ < setup_.cells()) return absl::OkStatus();
    setup_.head.Write(writer, kName);
    read_ = 0;
    next_row_ = -1;
    ++visit_;
    return absl::OkStatus();
  }

  // Nothing here is measured against something else.
  v1::Quality quality() const override {
    v1::Quality quality;
    quality.set_within_tolerance(true);
    return quality;
  }

 private:
  const model::ModelConfig& config() const { return subject_.model->config(); }

  // w_i s_i of each target row: its weight and the final norm's frozen scale.
  std::vector<float> FinalScales() const {
    const std::vector<float> weights = RowWeights(subject_);
    std::vector<float> scales;
    for (int64_t i = setup_.target.first; i < setup_.target.end(); ++i) {
      const float* const h = subject_.trace->stream(config().layers) + i * config().d_model;
      double squares = 0;
      for (int64_t m = 0; m < config().d_model; ++m) squares += double{h[m]} * h[m];
      scales.push_back(static_cast<float>(
          weights[i] / std::sqrt(squares / config().d_model + config().norm_eps)));
    }
    return scales;
  }

  // A block's share of the edges before out_proj, where they add up; after the last one what the
  // head reads of them.
  void AddRows() {
    const int64_t first = next_row_, count = setup_.BlockAt(first), d_inner = config().d_inner;
    setup_.layer.OpenRows(first, count, scale_.data() + (first - setup_.target.first));
    subject_.pool->Run(setup_.cells(), [&](int64_t cell) {
      const int64_t source = setup_.sources[cell];
      for (int64_t i = first; i < first + count; ++i) {
        if (source >= setup_.layer.ReadTo(i)) continue;
        setup_.layer.Inputs(i, source, source + 1, /*accumulate=*/true,
                            inputs_.data() + cell * d_inner);
      }
    });
    next_row_ += count;
    if (next_row_ < setup_.target.end()) return;
    const int64_t cells = setup_.cells(), d_model = config().d_model;
    kernels::Linear(*subject_.pool, {inputs_.data(), cells, d_inner, d_inner},
                    setup_.layer.weights().out_proj, nullptr,
                    {edges_.data(), cells, d_model, d_model});
    const float* const norm = subject_.model->weights().views().norm_f;
    for (int64_t e = 0; e < cells * d_model; ++e) edges_[e] *= norm[e % d_model];
  }

  const Subject subject_;
  Setup setup_;
  model::StreamWalk walk_;
  const std::vector<float> scale_;
  size_t visit_ = 0;
  int64_t next_row_ = -1;  // -1: the layer is not open
  int64_t read_ = 0;       // cells of the layer
  Array<float> inputs_;    // [cells, d_inner]
  Array<float> edges_;     // [cells, d_model]
};

class EdgeLens : public Method {
 public:
  absl::string_view name() const override { return kName; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, const std::string& field, Violations& violations) const override {
    const v1::EdgeLens& options = explanation.edge_lens();
    CheckLogitTarget(explanation, field, violations);
    CheckSinglePosition(explanation, field, violations);
    CheckLayers(options.layers(), config, field, violations);
    CheckIndices(options.sources(), static_cast<int32_t>(tokens), kMaxLensPositions,
                 field + ".sources", violations);
    CheckLensTop(options.top(), config, field, violations);
    const int64_t position = PositionOf(explanation, config, tokens);
    const int64_t reads = ReadTokens(config, position, tokens);
    for (int i = 0; i < std::min(options.sources_size(), kMaxLensPositions); ++i) {
      const int32_t source = options.sources(i);
      if (source < reads || source >= tokens) continue;
      violations.Add(absl::StrCat(field, ".sources[", i, "]"),
                     absl::StrCat(source, " comes after the target's position ", position,
                                  ", which reads nothing of it"));
    }
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const Setup setup(explanation, config, tokens);
    const int64_t cells = setup.cells(), blocks = setup.blocks();
    const auto layers = static_cast<int64_t>(setup.layers.size());
    const int32_t recomputed = RecomputedLayers(setup.layers, setup.stream_stride);
    Plan plan;
    plan.tensors = LensTensors(kName, setup.layers, {"sources", cells, setup.sources},
                               LensTop(explanation.edge_lens().top(), config), dtype);
    plan.streams = true;
    plan.slices = layers * (1 + blocks + setup.head.Slices(cells)) + recomputed;
    plan.memory_bytes = setup.layer.MemoryBytes(setup.target.count) +
                        setup.head.MemoryBytes(cells) +
                        4 * (cells * (config.d_inner + config.d_model) + 2 * tokens) +
                        model::StreamWalk::MemoryBytes(config, setup.prefix, setup.stream_stride);
    const double rows = static_cast<double>(layers) * static_cast<double>(setup.target.count);
    plan.work.gemm =
        static_cast<double>(layers * cells) * config.d_model * (config.outputs() + config.d_inner);
    plan.work.scan = rows * static_cast<double>(setup.prefix) * config.directions() *
                     config.maps() * config.d_state;
    plan.work.forward_tokens =
        static_cast<double>((layers + recomputed) * setup.prefix) / config.layers;
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(options, subject);
  }
};

}  // namespace

std::unique_ptr<const Method> NewEdgeLens() { return std::make_unique<EdgeLens>(); }

}  // namespace mambascope::explain
