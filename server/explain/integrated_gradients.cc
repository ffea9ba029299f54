// Integrated gradients, midpoint rule (methods.md, section 6; Sundararajan et al., arXiv
// 1703.01365): (e - e0) times the mean gradient along the line from e0 to e.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/status.h"
#include "server/explain/embedded_pass.h"
#include "server/explain/gradient_walk.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"
#include "server/explain/options.h"

namespace mambascope::explain {
namespace {

using Options = v1::IntegratedGradients;
using kernels::BackwardRule;

constexpr absl::string_view kName = "integrated_gradients";
constexpr int32_t kDefaultSteps = 16, kMostSteps = 512;
// A sum of so few slopes is an approximation: within a twentieth it can be told to people.
constexpr float kTolerance = 0.05f;

int32_t StepsOf(const v1::Explanation& explanation) {
  const int32_t steps = explanation.integrated_gradients().steps();
  return steps == 0 ? kDefaultSteps : steps;
}

// e0, [tokens, d_model].
std::vector<float> Baseline(const Subject& subject, const Options& options) {
  const model::ModelConfig& config = subject.model->config();
  std::vector<float> embeddings(subject.tokens * config.d_model, 0);
  if (options.zero_baseline()) return embeddings;
  if (!subject.image.empty()) {
    const std::vector<float> image(subject.image.size(), 0);
    subject.model->Embed(*subject.pool, {}, image, embeddings);
    return embeddings;
  }
  std::vector<int32_t> tokens(subject.tokens, subject.padding_token);
  if (options.has_baseline_token_id()) {
    std::fill(tokens.begin(), tokens.end(), options.baseline_token_id());
  } else if (options.has_baseline_token_ids()) {
    // One for each token of the input, of which the target may have read fewer.
    MS_CHECK(options.baseline_token_ids().ids_size() >= subject.tokens);
    std::copy_n(options.baseline_token_ids().ids().begin(), subject.tokens, tokens.begin());
  }
  subject.model->Embed(*subject.pool, tokens, {}, embeddings);
  return embeddings;
}

class Explainer : public Explaining {
 public:
  Explainer(const Options& options, int32_t steps, const Subject& subject)
      : subject_([&] {
          Subject read = subject;
          read.tokens = ReadTokens(subject.model->config(), subject.position, subject.tokens);
          read.gradients = nullptr;  // each step has a gradient of its own
          return read;
        }()),
        tokens_(subject.tokens),
        options_(options),
        steps_(steps),
        stride_(model::SequenceTrace::StreamStride(subject.model->config(), subject_.tokens)),
        pass_(subject_, stride_) {}

  // The passes one after the other: the baseline's, then each step's with its gradient.
  absl::Status Step(TensorWriter& writer) override {
    if (input_.empty()) RETURN_IF_ERROR(Prepare());
    if (walk_.has_value()) {
      RETURN_IF_ERROR(walk_->Step());
      if (!walk_->done()) return absl::OkStatus();
      AddGradient();
      return step_ + 1 == steps_ ? Write(writer) : Begin();
    }
    RETURN_IF_ERROR(pass_.Step());
    if (!pass_.done()) return absl::OkStatus();
    if (step_ < 0) {
      baseline_value_ = pass_.value();
      return Begin();
    }
    Subject at = subject_;
    at.trace = &pass_.trace();
    walk_.emplace(at, BackwardRule::kGradient, stride_);
    return absl::OkStatus();
  }

  v1::Quality quality() const override {
    v1::Quality quality;
    auto& completeness = *quality.mutable_completeness();
    completeness.set_sum(sum_);
    completeness.set_expected(subject_.explained - baseline_value_);
    const double scale = std::max(std::fabs(completeness.expected()), largest_);
    if (scale > 0) {
      completeness.set_relative_error(std::fabs(sum_ - completeness.expected()) / scale);
    }
    quality.set_tolerance(kTolerance);
    quality.set_within_tolerance(completeness.relative_error() <= kTolerance);
    return quality;
  }

  static int64_t Slices(const model::ModelConfig& config, int64_t tokens, int32_t steps) {
    const int32_t stride = model::SequenceTrace::StreamStride(config, tokens);
    return config.layers + int64_t{steps} * (config.layers + GradientWalk::Slices(config, stride));
  }

 private:
  absl::Status Prepare() {
    const int64_t values = subject_.tokens * subject_.model->config().d_model;
    input_.resize(values);
    subject_.model->Embed(*subject_.pool,
                          subject_.token_ids.first(subject_.image.empty() ? subject_.tokens : 0),
                          subject_.image, input_);
    baseline_ = Baseline(subject_, options_);
    mean_.assign(values, 0);
    at_ = baseline_;
    return pass_.Begin(at_);
  }

  // The pass at the middle of the next step.
  absl::Status Begin() {
    walk_.reset();
    ++step_;
    const auto share = static_cast<float>((step_ + 0.5) / steps_);
    for (size_t i = 0; i < at_.size(); ++i) {
      at_[i] = baseline_[i] + share * (input_[i] - baseline_[i]);
    }
    return pass_.Begin(at_);
  }

  void AddGradient() {
    const std::vector<float>& gradient = walk_->result().embeddings;
    for (size_t i = 0; i < mean_.size(); ++i) mean_[i] += gradient[i] / steps_;
  }

  absl::Status Write(TensorWriter& writer) {
    const int64_t d_model = subject_.model->config().d_model;
    std::vector<float> scores(tokens_, 0);
    for (int64_t j = 0; j < subject_.tokens; ++j) {
      double score = 0;
      for (int64_t m = 0; m < d_model; ++m) {
        const int64_t at = j * d_model + m;
        score += (double{input_[at]} - baseline_[at]) * mean_[at];
      }
      scores[j] = static_cast<float>(score);
      sum_ += score;
      largest_ = std::max(largest_, std::fabs(score));
    }
    RETURN_IF_ERROR(CheckFinite(kName, 0, scores));
    writer.Write(kName, scores);
    return absl::OkStatus();
  }

  const Subject subject_;  // its tokens are those that the target can have read
  const int64_t tokens_;
  const Options options_;
  const int32_t steps_, stride_;
  EmbeddedPass pass_;
  std::optional<GradientWalk> walk_;
  int32_t step_ = -1;  // -1: the baseline's pass
  std::vector<float> input_, baseline_, at_;
  std::vector<double> mean_;  // of the gradients so far
  double baseline_value_ = 0, sum_ = 0, largest_ = 0;
};

class IntegratedGradients : public Method {
 public:
  absl::string_view name() const override { return kName; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, const std::string& field, Violations& violations) const override {
    const Options& options = explanation.integrated_gradients();
    if (options.steps() < 0 || options.steps() > kMostSteps) {
      violations.Add(field + ".steps", absl::StrCat(options.steps(), " is not in [1, ", kMostSteps,
                                                    "]; 0 or absent is ", kDefaultSteps));
    }
    CheckBaseline(options, config, tokens, field, violations);
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const int64_t read = ReadTokens(config, PositionOf(explanation, config, tokens), tokens);
    const int32_t steps = StepsOf(explanation);
    const int32_t stride = model::SequenceTrace::StreamStride(config, read);
    Plan plan;
    plan.tensors.push_back(
        MakeTensorInfo(std::string(kName), {{"input_tokens", tokens, {}}}, dtype));
    plan.slices = Explainer::Slices(config, read, steps);
    plan.memory_bytes = EmbeddedPass::MemoryBytes(config, read, stride) +
                        GradientWalk::MemoryBytes(config, read, stride, BackwardRule::kGradient) +
                        read * config.d_model * (3 * 4 + 8) + 8 * tokens;
    plan.work.forward_tokens =
        static_cast<double>(read) +
        steps * (static_cast<double>(read) + GradientWalk::ForwardTokens(config, read, stride));
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& explanation,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(explanation.integrated_gradients(), StepsOf(explanation),
                                       subject);
  }

 private:
  static void CheckBaseline(const Options& options, const model::ModelConfig& config,
                            int64_t tokens, const std::string& field, Violations& violations) {
    switch (options.baseline_case()) {
      case Options::BASELINE_NOT_SET:
        if (config.task != model::Task::kImageClass && config.end_of_text.empty()) {
          violations.Add(field + ".baseline",
                         "none given, and the model names no end-of-text token to stand for "
                         "padding: give baseline_token_id");
        }
        return;
      case Options::kZeroBaseline:
        if (!options.zero_baseline()) violations.Add(field + ".zero_baseline", "must be true");
        return;
      default:
        break;
    }
    if (config.task == model::Task::kImageClass) {
      violations.Add(field + ".baseline",
                     "an image has no token ids; there are zero_baseline and "
                     "none, the all-zero normalised image");
    } else if (options.has_baseline_token_id()) {
      CheckTokenOfVocabulary(options.baseline_token_id(), config, field + ".baseline_token_id",
                             violations);
    } else if (options.baseline_token_ids().ids_size() != tokens) {
      violations.Add(field + ".baseline_token_ids",
                     absl::StrCat(options.baseline_token_ids().ids_size(), " ids for ", tokens,
                                  " tokens of the input; give as many"));
    } else {
      for (const int32_t id : options.baseline_token_ids().ids()) {
        CheckTokenOfVocabulary(id, config, field + ".baseline_token_ids", violations);
      }
    }
  }
};

}  // namespace

std::unique_ptr<const Method> NewIntegratedGradients() {
  return std::make_unique<IntegratedGradients>();
}

}  // namespace mambascope::explain
