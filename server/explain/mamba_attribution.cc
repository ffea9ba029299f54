// Mamba-Attribution: rollout of (gradient x hidden attention)^+ (methods.md, section 4; The Hidden
// Attention of Mamba Models, arXiv 2403.01590, section 4.2). The clamp is not linear, so that each
// layer's whole map is made; a row is carried through them from the last layer down. The published
// vision notebook (CODE) has one row for all rows of a layer, and the stream's gradient.
#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/status.h"
#include "server/explain/gradient_walk.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/explain/reconstruction.h"
#include "server/explain/target_row.h"

namespace mambascope::explain {
namespace {

using Options = v1::MambaAttribution;
using Rollout = v1::AttentionRollout;
using kernels::BackwardRule;

constexpr absl::string_view kName = "mamba_attribution";
constexpr absl::string_view kWithoutSelf = "without_self";

ChannelReduction Mean() { return {v1::REDUCTION_MEAN, {}, 0}; }

// What the options come to for a model and an input.
struct Setup {
  Setup(const v1::Explanation& explanation, const model::ModelConfig& config, int64_t length)
      : tokens(length),
        row(explanation, config, length),
        options(explanation.mamba_attribution()),
        layers(config.layers - options.start_layer()),
        variant(VariantOf(options.variant())),
        stride(model::SequenceTrace::StreamStride(config, row.prefix)),
        gradient_slices(GradientWalk::Slices(config, stride)),
        attention(Mean(),
                  IsCode(variant) ? LayerAttention::Want::kChannelRows : LayerAttention::Want::kMap,
                  /*relu=*/false, config, tokens, row.prefix) {}

  int64_t slices() const { return gradient_slices + layers * attention.pieces(); }

  int64_t tokens;
  TargetRow row;
  Options options;
  int32_t layers;
  v1::Variant variant;
  int32_t stride, gradient_slices;
  LayerAttention attention;
};

class Explainer : public Explaining {
 public:
  Explainer(const v1::Explanation& explanation, const Subject& subject)
      : subject_(subject),
        setup_(explanation, subject.model->config(), subject.tokens),
        causal_(subject.model->config().family != model::Family::kVim),
        walk_(subject, BackwardRule::kGradient, setup_.stride),
        reconstruction_(subject) {
    const std::vector<float> start = RowWeights(subject);
    row_.assign(start.begin(), start.begin() + setup_.row.prefix);
    self_ = row_;
  }

  absl::Status Step(TensorWriter& writer) override {
    const int64_t step = next_++;
    if (step < setup_.gradient_slices) return walk_.Step();
    MS_CHECK(walk_.done());
    if (!IsCode(setup_.variant) && map_.empty())
      map_ = Array<float>(setup_.row.prefix * setup_.row.prefix);
    LayerAttention& attention = setup_.attention;
    const int64_t done = (step - setup_.gradient_slices) / attention.pieces();
    const int64_t piece = (step - setup_.gradient_slices) % attention.pieces();
    const auto layer =
        static_cast<int32_t>(setup_.options.start_layer() + setup_.layers - 1 - done);
    if (piece == 0) {
      attention.Open(subject_, layer);
      mean_.assign(setup_.row.prefix, 0);
    }
    const bool last_piece = piece + 1 == attention.pieces();
    if (IsCode(setup_.variant)) {
      attention.AddExtremes(piece, setup_.row.position, setup_.variant == v1::VARIANT_CODE_QUIRKS,
                            /*positive=*/true, mean_, &extremes_);
      if (last_piece) {
        WeighTargetRow(layer);
        smallest_row_sum_ = std::min(smallest_row_sum_, MultiplyByRepeatedRow(mean_, row_));
      }
    } else {
      attention.AddMap(piece, map_.data());
      if (last_piece) Multiply(layer);
    }
    if (!last_piece) return absl::OkStatus();
    CheckLayer(layer);
    return done + 1 < setup_.layers ? absl::OkStatus() : Write(writer);
  }

  v1::Quality quality() const override {
    v1::Quality quality;
    reconstruction_.Report(&quality);
    if (row_sums()) quality.set_smallest_row_sum(static_cast<float>(smallest_row_sum_));
    return quality;
  }

 private:
  bool row_sums() const {
    return IsCode(setup_.variant) ||
           setup_.options.normalization() == Rollout::NORMALIZATION_ROW_SUM;
  }

  void CheckLayer(int32_t layer) {
    LayerAttention& attention = setup_.attention;
    if (IsCode(setup_.variant)) {
      reconstruction_.CheckRow(layer, setup_.row, setup_.row.Weights(subject_), attention);
    } else {
      reconstruction_.CheckMaps(layer, Reconstruction::MapsOf(attention), attention, map_.data());
    }
  }

  // mean_ <- mean_d minmax(alpha^+) times minmax of the stream's largest positive gradient.
  void WeighTargetRow(int32_t layer) {
    const int64_t L = setup_.row.prefix;
    const float* peak = walk_.result().stream_peak.data() + layer * L;
    const auto [low, high] = std::minmax_element(peak, peak + L);
    const double range = double{extremes_.high} - extremes_.low, peak_range = double{*high} - *low;
    for (int64_t j = 0; j < L; ++j) {
      const double of_map = range == 0 ? 0 : (mean_[j] - extremes_.low) / range;
      mean_[j] = peak_range == 0 ? 0 : of_map * (peak[j] - *low) / peak_range;
    }
  }

  // (gradient x map)^+ in place, and the sums of its rows with the identity's 1.
  void Weigh(int32_t layer) {
    const int64_t L = setup_.row.prefix;
    const float* gradient = walk_.result().gated_mean.data() + layer * L;
    const bool output = setup_.options.broadcast() == Options::BROADCAST_OUTPUT;
    sums_.resize(L);
    subject_.pool->Split(L, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float* row = map_.data() + i * L;
        double sum = 1;
        for (int64_t j = 0; j < (causal_ ? i + 1 : L); ++j) {
          row[j] = std::max(row[j] * gradient[output ? i : j], 0.0f);  // NaN stays
          sum += row[j];
        }
        sums_[i] = sum;
      }
    });
  }

  // row <- row (I + (gradient x map)^+), its rows divided by their sums if asked: never below 1.
  void Multiply(int32_t layer) {
    const int64_t L = setup_.row.prefix;
    Weigh(layer);
    if (row_sums()) {
      for (int64_t i = 0; i < L; ++i) {
        row_[i] /= sums_[i];
        self_[i] /= sums_[i];
        smallest_row_sum_ = std::min(smallest_row_sum_, sums_[i]);
      }
    }
    std::vector<double> added(L, 0);
    subject_.pool->Split(L, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = causal_ ? begin : 0; i < L; ++i) {
        const float* row = map_.data() + i * L;
        const int64_t last = causal_ ? std::min(end, i + 1) : end;
        for (int64_t j = begin; j < last; ++j) added[j] += row_[i] * row[j];
      }
    });
    for (int64_t j = 0; j < L; ++j) row_[j] += added[j];
  }

  absl::Status Write(TensorWriter& writer) {
    std::vector<float> values(row_.begin(), row_.end());
    RETURN_IF_ERROR(CheckFinite(kName, setup_.options.start_layer(), values));
    if (IsCode(setup_.variant)) {
      WriteCodeRow(writer, kName, std::move(values), setup_.row.position, setup_.tokens);
      return absl::OkStatus();
    }
    WriteRow(writer, kName, values, setup_.tokens);
    for (int64_t j = 0; j < setup_.row.prefix; ++j) {
      values[j] =
          static_cast<float>(std::max(0.0, row_[j] - self_[j]));  // never below but by rounding
    }
    WriteRow(writer, kWithoutSelf, values, setup_.tokens);
    return absl::OkStatus();
  }

  const Subject subject_;
  Setup setup_;
  const bool causal_;
  GradientWalk walk_;
  Reconstruction reconstruction_;
  int64_t next_ = 0;
  Array<float> map_;          // of a layer
  std::vector<double> row_;   // of the product so far
  std::vector<double> self_;  // what of it came by the identity alone
  std::vector<double> sums_;  // of the rows of a layer
  std::vector<double> mean_;  // CODE: of a layer's target row over channels
  LayerAttention::Extremes extremes_;
  double smallest_row_sum_ = std::numeric_limits<double>::infinity();
};

class MambaAttribution : public Method {
 public:
  absl::string_view name() const override { return kName; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, const std::string& field, Violations& violations) const override {
    const Options& options = explanation.mamba_attribution();
    CheckEnum(Options::Broadcast_IsValid(options.broadcast()), options.broadcast(),
              field + ".broadcast", violations);
    CheckStartLayer(options.start_layer(), config, field, violations);
    CheckEnum(Rollout::Normalization_IsValid(options.normalization()), options.normalization(),
              field + ".normalization", violations);
    CheckVariant(options.variant(), v1::REDUCTION_MEAN, field, violations);
    CheckOneRow(options.variant(), explanation, config, tokens, field, violations);
    if (!IsCode(options.variant())) return;
    const std::string& variant = v1::Variant_Name(options.variant());
    if (options.broadcast() != Options::BROADCAST_UNSPECIFIED) {
      violations.Add(field + ".broadcast", absl::StrCat("does not go with ", variant));
    }
    if (options.normalization() != Rollout::NORMALIZATION_UNSPECIFIED) {
      violations.Add(
          field + ".normalization",
          absl::StrCat("does not go with ", variant, ", which always divides rows by their sums"));
    }
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const Setup setup(explanation, config, tokens);
    Plan plan;
    const bool code = IsCode(setup.variant);
    for (const absl::string_view tensor : {kName, kWithoutSelf}) {
      if (code && tensor == kWithoutSelf) break;
      const Axis axis =
          code ? TokensWithout(setup.row.position, tokens) : Axis{"input_tokens", tokens, {}};
      plan.tensors.push_back(MakeTensorInfo(std::string(tensor), {axis}, dtype));
      plan.tensors.back().set_nonnegative(true);
    }
    plan.slices = setup.slices();
    plan.streams = true;
    const int64_t walk =
        GradientWalk::MemoryBytes(config, setup.row.prefix, setup.stride, BackwardRule::kGradient);
    const int64_t maps = setup.attention.memory_bytes() +
                         (code ? 0 : 4 * setup.row.prefix * setup.row.prefix) +
                         Reconstruction::MemoryBytes(config, setup.row.prefix);
    plan.memory_bytes = walk + maps + 64 * tokens;
    plan.work.forward_tokens = GradientWalk::ForwardTokens(config, setup.row.prefix, setup.stride);
    plan.work += setup.layers * setup.attention.work();
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(options, subject);
  }
};

}  // namespace

std::unique_ptr<const Method> NewMambaAttribution() { return std::make_unique<MambaAttribution>(); }

}  // namespace mambascope::explain
