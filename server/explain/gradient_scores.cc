#include "server/explain/gradient_scores.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "server/base/status.h"
#include "server/explain/gradient_walk.h"
#include "server/explain/layer_attention.h"
#include "server/explain/options.h"
#include "server/kernels/gemm.h"
#include "server/kernels/rms_norm.h"

namespace mambascope::explain {
namespace {

using kernels::BackwardRule;

// Relevance is conserved up to fp32's rounding through all layers: 1e-6 to 1e-5 was seen.
constexpr float kConservationTolerance = 1e-3f;

v1::Rows RowsOf(const v1::Explanation& explanation) {
  return explanation.has_mamba_lrp() ? explanation.mamba_lrp().rows()
                                     : explanation.gradient_x_input().rows();
}

// The most probable token after a position, and its logit.
std::pair<int32_t, float> MostProbable(const Subject& subject, int64_t position) {
  const model::ModelConfig& config = subject.model->config();
  const model::WeightViews& weights = subject.model->weights().views();
  const int64_t d_model = config.d_model, outputs = config.outputs();
  std::vector<float> row(d_model), logits(outputs);
  kernels::RmsNorm(*subject.pool, subject.trace->stream(config.layers) + position * d_model,
                   weights.norm_f, config.norm_eps, 1, d_model, row.data());
  kernels::Linear(*subject.pool, {row.data(), 1, d_model, d_model}, weights.head, weights.head_bias,
                  {logits.data(), 1, outputs, outputs});
  const auto best = std::max_element(logits.begin(), logits.end());
  return {static_cast<int32_t>(best - logits.begin()), *best};
}

class Explainer : public Explaining {
 public:
  Explainer(absl::string_view name, BackwardRule rule, bool all_rows, const Subject& subject)
      : name_(name), rule_(rule), all_rows_(all_rows), subject_(subject) {}

  absl::Status Step(TensorWriter& writer) override {
    if (!walk_.has_value()) {
      const Subject subject = all_rows_ ? SubjectOfRow() : subject_;
      explained_ = subject.explained;
      walk_.emplace(subject, rule_, stride_);
    }
    RETURN_IF_ERROR(walk_->Step());
    if (--left_ > 0) return absl::OkStatus();
    const std::vector<float> scores = TimesEmbeddings(subject_, walk_->result());
    RETURN_IF_ERROR(CheckFinite(name_, 0, scores));
    writer.Write(name_, scores);
    if (rule_ == BackwardRule::kRelevance) Compare(scores);
    walk_.reset();
    left_ = slices_of_row();
    ++row_;
    return absl::OkStatus();
  }

  v1::Quality quality() const override {
    v1::Quality quality;
    quality.set_within_tolerance(true);
    if (rule_ != BackwardRule::kRelevance) return quality;
    quality.set_tolerance(kConservationTolerance);
    quality.set_within_tolerance(worst_.relative_error() <= kConservationTolerance);
    *quality.mutable_completeness() = worst_;
    quality.set_bias_relevance(bias_relevance_);
    if (worst_.expected() != 0) quality.set_bias_share(bias_relevance_ / worst_.expected());
    return quality;
  }

 private:
  int32_t slices_of_row() const { return GradientWalk::Slices(subject_.model->config(), stride_); }

  // Of rows ALL: what the row explains. No other method asks for it.
  Subject SubjectOfRow() {
    Subject subject = subject_;
    Output output;
    output.position = static_cast<int32_t>(row_);
    const auto [token, logit] = MostProbable(subject_, row_);
    output.token = token;
    subject.explained = logit;
    subject.position = output.position;
    subject.outputs = {output};
    subject.gradients = nullptr;
    return subject;
  }

  // Conservation; of rows ALL the worst row stands.
  void Compare(const std::vector<float>& scores) {
    v1::Quality::Completeness found;
    double largest = 0;
    for (const float score : scores) {
      found.set_sum(found.sum() + score);
      largest = std::max(largest, std::fabs(double{score}));
    }
    const double biases = walk_->result().bias_relevance;
    found.set_sum(found.sum() + biases);
    found.set_expected(explained_);
    largest = std::max(largest, std::fabs(found.expected()));
    if (largest > 0) found.set_relative_error(std::fabs(found.sum() - found.expected()) / largest);
    if (row_ > 0 && found.relative_error() <= worst_.relative_error()) return;
    worst_ = found;
    bias_relevance_ = biases;
  }

  const absl::string_view name_;
  const BackwardRule rule_;
  const bool all_rows_;
  const Subject subject_;
  const int32_t stride_ =
      model::SequenceTrace::StreamStride(subject_.model->config(), subject_.tokens);
  std::optional<GradientWalk> walk_;
  int64_t row_ = 0;
  double explained_ = 0;  // of the row
  int32_t left_ = slices_of_row();
  v1::Quality::Completeness worst_;
  double bias_relevance_ = 0;
};

class GradientScores : public Method {
 public:
  GradientScores(absl::string_view name, BackwardRule rule) : name_(name), rule_(rule) {}

  absl::string_view name() const override { return name_; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t /*tokens*/, const std::string& field,
                Violations& violations) const override {
    const v1::Rows rows = RowsOf(explanation);
    CheckEnum(v1::Rows_IsValid(rows), rows, field + ".rows", violations);
    const v1::Target& target = explanation.target();
    if (rows == v1::ROWS_ALL &&
        (config.task != model::Task::kNextToken || target.has_generated())) {
      violations.Add(field + ".rows",
                     "ROWS_ALL explains the tokens of a prompt; of classifiers and generated "
                     "targets there is ROWS_TARGET");
    }
    if (rows == v1::ROWS_ALL &&
        (target.has_position() || target.output_case() != v1::Target::OUTPUT_NOT_SET ||
         target.contrast_case() != v1::Target::CONTRAST_NOT_SET)) {
      violations.Add(field + ".rows",
                     "ROWS_ALL explains the most probable token after every position: it goes with "
                     "neither a position, nor an output, nor a contrast in target");
    }
    if (rule_ == BackwardRule::kRelevance) CheckLogitTarget(explanation, field, violations);
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const int64_t rows = RowsOf(explanation) == v1::ROWS_ALL ? tokens : 1;
    const int32_t stride = model::SequenceTrace::StreamStride(config, tokens);
    std::vector<Axis> axes;
    if (RowsOf(explanation) == v1::ROWS_ALL) axes.push_back({"output_tokens", rows, {}});
    axes.push_back({"input_tokens", tokens, {}});
    Plan plan;
    plan.tensors.push_back(MakeTensorInfo(std::string(name_), std::move(axes), dtype));
    plan.slices = rows * GradientWalk::Slices(config, stride);
    plan.streams = true;
    plan.memory_bytes = GradientWalk::MemoryBytes(config, tokens, stride, rule_) +
                        4 * tokens * (config.d_model + 4);
    plan.work.forward_tokens =
        GradientWalk::ForwardTokens(config, tokens, stride) * (rows > 1 ? rows / 2.0 : 1.0);
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(name_, rule_, RowsOf(options) == v1::ROWS_ALL, subject);
  }

 private:
  const absl::string_view name_;
  const BackwardRule rule_;
};

}  // namespace

std::unique_ptr<const Method> NewGradientScores(absl::string_view name, BackwardRule rule) {
  return std::make_unique<GradientScores>(name, rule);
}

}  // namespace mambascope::explain
