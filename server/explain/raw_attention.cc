// Raw attention: the mean over layers of the target's row (methods.md, section 4; The Hidden
// Attention of Mamba Models, arXiv 2403.01590, section 4.1). A row is one adjoint scan, so the
// length enters linearly.
#include <utility>

#include "server/base/check.h"
#include "server/base/status.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/explain/reconstruction.h"
#include "server/explain/target_row.h"

namespace mambascope::explain {
namespace {

constexpr absl::string_view kName = "raw_attention";

// What the options come to for a model and an input.
struct Setup {
  Setup(const v1::Explanation& explanation, const model::ModelConfig& config, int64_t length,
        const TargetRow& row)
      : tokens(length),
        target(row),
        start_layer(explanation.raw_attention().start_layer()),
        layers(config.layers - start_layer),
        variant(VariantOf(explanation.raw_attention().variant())),
        attention(ReductionOf(explanation.raw_attention(), config),
                  IsCode(variant) ? LayerAttention::Want::kChannelRows : LayerAttention::Want::kRow,
                  /*relu=*/false, config, tokens, row.prefix, row.spread) {}

  int64_t steps_per_layer() const { return attention.rank_pieces() + attention.pieces(); }

  int64_t tokens;
  TargetRow target;
  int32_t start_layer, layers;
  v1::Variant variant;
  LayerAttention attention;
};

class Explainer : public Explaining {
 public:
  Explainer(const v1::Explanation& options, const Subject& subject)
      : subject_(subject),
        setup_(options, subject.model->config(), subject.tokens, TargetRow(options, subject)),
        weights_(setup_.target.Weights(subject)),
        reconstruction_(subject),
        sum_(setup_.target.prefix, 0) {}

  absl::Status Step(TensorWriter& writer) override {
    const int64_t steps = setup_.steps_per_layer(), step = next_ % steps;
    const int64_t done = next_ / steps;
    MS_CHECK(done < setup_.layers);
    const auto layer = static_cast<int32_t>(setup_.start_layer + done);
    ++next_;
    LayerAttention& attention = setup_.attention;
    if (step == 0) {
      attention.Open(subject_, layer);
      row_.assign(sum_.size(), 0);
    }
    const int64_t piece = step - attention.rank_pieces();
    if (piece < 0) {
      attention.Rank(step);
    } else if (IsCode(setup_.variant)) {
      attention.AddExtremes(piece, setup_.target.position,
                            setup_.variant == v1::VARIANT_CODE_QUIRKS, /*positive=*/false, row_,
                            &extremes_);
    } else {
      attention.AddRow(piece, setup_.target.position, weights_, row_);
    }
    if (step + 1 < steps) return absl::OkStatus();

    if (IsCode(setup_.variant)) ScaleToUnitRange();
    const std::vector<float> row(row_.begin(), row_.end());
    RETURN_IF_ERROR(CheckFinite(kName, layer, row));
    for (size_t j = 0; j < sum_.size(); ++j) sum_[j] += row_[j];
    reconstruction_.CheckRow(layer, setup_.target, weights_, attention);
    if (done + 1 == setup_.layers) Write(writer);
    return absl::OkStatus();
  }

  v1::Quality quality() const override {
    v1::Quality quality;
    reconstruction_.Report(&quality);
    return quality;
  }

 private:
  // Min-max over all channels and positions before the mean over channels is the same as after it.
  void ScaleToUnitRange() {
    const double low = extremes_.low, range = extremes_.high - low;
    for (double& value : row_) value = range == 0 ? 0 : (value - low) / range;
  }

  void Write(TensorWriter& writer) {
    std::vector<float> mean(sum_.size());
    for (size_t j = 0; j < mean.size(); ++j) mean[j] = static_cast<float>(sum_[j] / setup_.layers);
    if (IsCode(setup_.variant)) {
      WriteCodeRow(writer, kName, std::move(mean), setup_.target.position, setup_.tokens);
    } else {
      WriteRow(writer, kName, mean, setup_.tokens);
    }
  }

  const Subject subject_;
  Setup setup_;
  const std::vector<float> weights_;  // of rows
  Reconstruction reconstruction_;
  int64_t next_ = 0;
  std::vector<double> row_, sum_;  // of a layer; of all layers so far
  LayerAttention::Extremes extremes_;
};

class RawAttention : public Method {
 public:
  absl::string_view name() const override { return kName; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, const std::string& field, Violations& violations) const override {
    const v1::RawAttention& options = explanation.raw_attention();
    CheckReduction(options.reduction(), options.channels(), config.maps(), options.top_k(), config,
                   field, violations);
    CheckStartLayer(options.start_layer(), config, field, violations);
    CheckVariant(options.variant(), options.reduction(), field, violations);
    CheckOneRow(options.variant(), explanation, config, tokens, field, violations);
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const Setup setup(explanation, config, tokens, TargetRow(explanation, config, tokens));
    Plan plan;
    plan.tensors.push_back(
        MakeTensorInfo(std::string(kName),
                       {IsCode(setup.variant) ? TokensWithout(setup.target.position, tokens)
                                              : Axis{"input_tokens", tokens, {}}},
                       dtype));
    plan.tensors[0].set_nonnegative(IsCode(setup.variant) || setup.attention.absolute());
    plan.slices = setup.layers * setup.steps_per_layer();
    constexpr int64_t kRows = 8;  // sum and row in double, their float forms, two of input
    plan.memory_bytes = setup.attention.memory_bytes() + 4 * kRows * tokens +
                        Reconstruction::MemoryBytes(config, setup.target.prefix);
    Work layer = setup.attention.work();
    layer += Reconstruction::RowWork(config, setup.target.prefix);
    plan.work = setup.layers * layer;
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(options, subject);
  }
};

}  // namespace

std::unique_ptr<const Method> NewRawAttention() { return std::make_unique<RawAttention>(); }

}  // namespace mambascope::explain
