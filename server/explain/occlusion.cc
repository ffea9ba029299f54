// Occlusion: what the target loses when one token is replaced, for every token (methods.md,
// section 6). Tokens after the target's change nothing and are not evaluated.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "server/base/check.h"
#include "server/base/status.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/explain/variants.h"

namespace mambascope::explain {
namespace {

constexpr absl::string_view kName = "occlusion", kLogprobDrop = "logprob_drop",
                            kPerplexityRatio = "perplexity_ratio";

// The unchanged input's value, computed once more, may differ from what the prediction gave by as
// much of the larger of it and 1: passes on a device add in another order than the host's.
constexpr float kTolerance = 1e-4f;

Removal RemovalOf(const v1::Occlusion& options) {
  if (options.replacement_case() == v1::Occlusion::REPLACEMENT_NOT_SET) return {};
  return {Removal::How::kToken, options.replacement_token_id()};
}

// Nothing removed, then each token alone.
std::vector<std::vector<int32_t>> EachAlone(int64_t tokens) {
  std::vector<std::vector<int32_t>> removed(1);
  for (int32_t j = 0; j < tokens; ++j) removed.push_back({j});
  return removed;
}

VariantCost CostOf(const v1::Explanation& explanation, const model::ModelConfig& config,
                   int64_t tokens) {
  const int64_t rows = ReadTokens(config, PositionOf(explanation, config, tokens), tokens);
  std::vector<VariantExtent> extents = {{rows - 1, rows}};
  for (int64_t j = 0; j < rows; ++j) extents.push_back({j, rows});
  const int64_t outputs = std::min(SpanOf(explanation.target()), rows);
  constexpr int64_t kIntsOfList = 8;  // of a list with one position, as it lies in memory
  return VariantRunner::CostOf(config, std::move(extents), /*starts_known=*/true, rows, outputs,
                               kIntsOfList * rows);
}

class Explainer : public Explaining {
 public:
  Explainer(const v1::Explanation& explanation, const Subject& subject)
      : subject_(subject),
        slices_(CostOf(explanation, subject.model->config(), subject.tokens).slices),
        variants_(
            subject, RemovalOf(explanation.occlusion()),
            EachAlone(ReadTokens(subject.model->config(), subject.position, subject.tokens))) {}

  // As many of the runner's slices as keep pace with the plan's: on a device it has others.
  absl::Status Step(TensorWriter& writer) override {
    MS_CHECK(next_ < slices_);
    ++next_;
    for (; done_ < variants_.slices() * next_ / slices_; ++done_) {
      RETURN_IF_ERROR(variants_.Step());
    }
    return next_ < slices_ ? absl::OkStatus() : Write(writer);
  }

  v1::Quality quality() const override {
    v1::Quality quality;
    const double value = variants_.outcomes().front().value;
    quality.set_tolerance(kTolerance);
    quality.set_within_tolerance(std::fabs(value - subject_.explained) <=
                                 kTolerance * std::max(1.0, std::fabs(subject_.explained)));
    return quality;
  }

 private:
  absl::Status Write(TensorWriter& writer) {
    const std::vector<VariantOutcome>& outcomes = variants_.outcomes();
    std::vector<float> value(subject_.tokens, 0), logprob(subject_.tokens, 0);
    std::vector<float> ratio(subject_.tokens, 1);
    for (size_t j = 0; j + 1 < outcomes.size(); ++j) {
      value[j] = static_cast<float>(outcomes[0].value - outcomes[j + 1].value);
      const double drop = outcomes[0].log_probability - outcomes[j + 1].log_probability;
      logprob[j] = static_cast<float>(drop);
      // Without this token the target may be all but impossible: as large as a float can say.
      ratio[j] =
          static_cast<float>(std::min(std::exp(drop), double{std::numeric_limits<float>::max()}));
    }
    RETURN_IF_ERROR(CheckFinite(kName, 0, value));
    RETURN_IF_ERROR(CheckFinite(kName, 0, logprob));
    writer.Write(kName, value);
    writer.Write(kLogprobDrop, logprob);
    writer.Write(kPerplexityRatio, ratio);
    return absl::OkStatus();
  }

  const Subject subject_;
  const int64_t slices_;  // of the plan
  int64_t next_ = 0, done_ = 0;
  VariantRunner variants_;
};

class Occlusion : public Method {
 public:
  absl::string_view name() const override { return kName; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t /*tokens*/, const std::string& field,
                Violations& violations) const override {
    const v1::Occlusion& options = explanation.occlusion();
    CheckLogitTarget(explanation, field, violations);  // it gives both drops anyway
    if (options.replacement_case() == v1::Occlusion::kReplacementTokenId) {
      CheckTokenOfVocabulary(options.replacement_token_id(), config,
                             field + ".replacement_token_id", violations);
    }
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const VariantCost cost = CostOf(explanation, config, tokens);
    Plan plan;
    for (const absl::string_view tensor : {kName, kLogprobDrop, kPerplexityRatio}) {
      plan.tensors.push_back(
          MakeTensorInfo(std::string(tensor), {{"input_tokens", tokens, {}}}, dtype));
    }
    plan.tensors.back().set_nonnegative(true);
    plan.slices = cost.slices;
    plan.memory_bytes = cost.memory_bytes + 3 * static_cast<int64_t>(sizeof(float)) * tokens;
    plan.work = cost.work;
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(options, subject);
  }
};

}  // namespace

std::unique_ptr<const Method> NewOcclusion() { return std::make_unique<Occlusion>(); }

}  // namespace mambascope::explain
