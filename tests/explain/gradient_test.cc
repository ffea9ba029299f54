// Gradients against the float64 oracle, and their identities on random models.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "gtest/gtest.h"
#include "server/explain/gradient_walk.h"
#include "tests/explain/explained.h"
#include "tests/model/golden.h"
#include "tests/support/safetensors_io.h"

namespace mambascope {
namespace {

using kernels::BackwardRule;
using testing::Explained;
using testing::F64;
using testing::Traced;

std::string Folder(const std::string& model) {
  return MAMBASCOPE_SOURCE_DIR "/tests/golden/" + model;
}

double Largest(const std::vector<double>& values, double least) {
  for (const double value : values) least = std::max(least, std::fabs(value));
  return least;
}

void ExpectNear(std::span<const float> values, const std::vector<double>& golden, double bound,
                const std::string& what) {
  ASSERT_EQ(values.size(), golden.size()) << what;
  const double scale = Largest(golden, 0.1);
  double worst = 0;
  for (size_t i = 0; i < golden.size(); ++i) {
    ASSERT_TRUE(std::isfinite(values[i])) << what;
    worst = std::max(worst, std::fabs(values[i] - golden[i]) / scale);
  }
  EXPECT_LE(worst, bound) << what;
}

class GoldenGradient : public ::testing::TestWithParam<std::string> {
 protected:
  GoldenGradient() : model_(testing::LoadModel(Folder(GetParam()))) {
    const auto json =
        nlohmann::json::parse(testing::ReadBytes(Folder(GetParam()) + "/inputs.json"));
    for (const model::Input& input : model::ReadInputs(Folder(GetParam()))) {
      auto& traced = traced_[input.name];
      traced = input.image.empty() ? std::make_unique<Traced>(*model_, input.tokens)
                                   : std::make_unique<Traced>(*model_, input.image);
      const auto& described = json.at("inputs").at(input.name);
      targets_[input.name] = {described.at("target").get<int32_t>(),
                              described.at("contrast").get<int32_t>()};
    }
  }

  // "target" or "contrast" explained.
  void Aim(const std::string& input, const std::string& kind) {
    Traced& traced = *traced_.at(input);
    traced.token = targets_.at(input).first;
    traced.contrast = kind == "contrast" ? targets_.at(input).second : -1;
  }

  const testing::StoredTensors golden_ =
      testing::ReadSafetensors(Folder(GetParam()) + "/relevance.safetensors");
  std::unique_ptr<const model::MambaModel> model_;
  std::map<std::string, std::unique_ptr<Traced>> traced_;
  std::map<std::string, std::pair<int32_t, int32_t>> targets_;
};

TEST_P(GoldenGradient, RelevanceAndGradientAreTheOracles) {
  int compared = 0;
  for (const auto& [name, tensor] : golden_) {
    const auto slash = name.find('/'), second = name.find('/', slash + 1);
    if (second == std::string::npos) continue;
    const std::string input = name.substr(0, slash),
                      kind = name.substr(slash + 1, second - slash - 1);
    const std::string what = name.substr(second + 1);
    v1::Explanation explanation;
    if (what == "lrp" || what == "lrp_bias_share") explanation.mutable_mamba_lrp();
    if (what == "gradient_x_input") explanation.mutable_gradient_x_input();
    if (explanation.method_case() == v1::Explanation::METHOD_NOT_SET) continue;
    Aim(input, kind);
    const Explained explained = Explain(*traced_.at(input), explanation);
    ASSERT_TRUE(explained.status.ok()) << explained.status;
    if (what == "lrp_bias_share") {
      EXPECT_NEAR(explained.quality.bias_relevance(), F64(tensor)[0],
                  5e-5 * std::max(0.1, std::fabs(F64(tensor)[0])))
          << name;
    } else {
      ExpectNear(explained.values(), F64(tensor), 5e-5, name);
    }
    EXPECT_TRUE(explained.quality.within_tolerance()) << name;
    ++compared;
  }
  EXPECT_GT(compared, 0);
}

TEST_P(GoldenGradient, GradientsOfStreamsAndGatedAreTheOracles) {
  const auto aggregation =
      testing::ReadSafetensors(Folder(GetParam()) + "/aggregation.safetensors");
  const model::ModelConfig& config = model_->config();
  int compared = 0;
  for (auto& [input, traced] : traced_) {
    if (aggregation.count(input + "/grad_gated") == 0) continue;
    Aim(input, "target");
    v1::Explanation explanation;
    const auto subject =
        traced->SubjectAt(explain::PositionOf(explanation, config, traced->trace.tokens));
    explain::GradientWalk walk(subject, BackwardRule::kGradient, 1);
    while (!walk.done()) ASSERT_TRUE(walk.Step().ok());
    const int64_t L = subject.tokens, D = config.d_inner, M = config.d_model;
    const std::vector<double> gated = F64(aggregation.at(input + "/grad_gated"));
    const std::vector<double> stream = F64(aggregation.at(input + "/grad_stream"));
    std::vector<double> mean(config.layers * L, 0.0), peak(config.layers * L, 0.0);
    for (int64_t r = 0; r < config.layers * L; ++r) {
      for (int64_t d = 0; d < D; ++d) mean[r] += gated[r * D + d] / static_cast<double>(D);
      for (int64_t m = 0; m < M; ++m) peak[r] = std::max(peak[r], stream[r * M + m]);
    }
    ExpectNear(walk.result().gated_mean, mean, 5e-5, input + "/grad_gated");
    ExpectNear(walk.result().stream_peak, peak, 5e-5, input + "/grad_stream");
    ++compared;
  }
  EXPECT_GT(compared, 0);
}

TEST_P(GoldenGradient, IntegratedGradientsAreTheOracles) {
  for (const auto& [input, traced] : traced_) {
    for (const std::string kind : {"target", "contrast"}) {
      for (const std::string ending : {"", "_zero"}) {
        const std::string name = input + "/" + kind + "/integrated_gradients" + ending;
        if (golden_.count(name) == 0) continue;
        Aim(input, kind);
        v1::Explanation explanation;
        auto* options = explanation.mutable_integrated_gradients();
        options->set_steps(16);
        if (ending == "_zero") {
          options->set_zero_baseline(true);
        } else if (model_->config().task != model::Task::kImageClass) {
          options->set_baseline_token_id(5);
        }
        const Explained explained = Explain(*traced, explanation);
        ASSERT_TRUE(explained.status.ok()) << explained.status;
        ExpectNear(explained.values(), F64(golden_.at(name)), ending == "_zero" ? 1e-3 : 5e-5,
                   name);
        const double gap =
            explained.quality.completeness().sum() - explained.quality.completeness().expected();
        const double expected = F64(golden_.at(name + "_gap"))[0];
        EXPECT_NEAR(gap, expected, 1e-3 * std::max(0.1, std::fabs(expected))) << name;
      }
    }
  }
}

TEST_P(GoldenGradient, MambaAttributionIsTheOracles) {
  const auto aggregation =
      testing::ReadSafetensors(Folder(GetParam()) + "/aggregation.safetensors");
  const std::map<std::string, std::function<void(v1::MambaAttribution*)>> variants = {
      {"attribution_source", [](auto*) {}},
      {"attribution_without_self", [](auto*) {}},
      {"attribution_output",
       [](auto* o) { o->set_broadcast(v1::MambaAttribution::BROADCAST_OUTPUT); }},
      {"attribution_normalised_source",
       [](auto* o) { o->set_normalization(v1::AttentionRollout::NORMALIZATION_ROW_SUM); }},
      {"attribution_normalised_output",
       [](auto* o) {
         o->set_normalization(v1::AttentionRollout::NORMALIZATION_ROW_SUM);
         o->set_broadcast(v1::MambaAttribution::BROADCAST_OUTPUT);
       }},
      {"code/attribution", [](auto* o) { o->set_variant(v1::VARIANT_CODE); }},
      {"code_quirks/attribution", [](auto* o) { o->set_variant(v1::VARIANT_CODE_QUIRKS); }},
  };
  int compared = 0;
  for (const auto& [name, tensor] : aggregation) {
    const auto slash = name.find('/'), second = name.find('/', slash + 1);
    if (second == std::string::npos) continue;
    const auto variant = variants.find(name.substr(second + 1));
    if (variant == variants.end() || F64(tensor).empty()) continue;
    const std::string input = name.substr(0, slash);
    Aim(input, "target");
    v1::Explanation explanation;
    auto* options = explanation.mutable_mamba_attribution();
    options->set_start_layer(std::stoi(name.substr(slash + 6)));  // "start<k>"
    variant->second(options);
    const Explained explained = Explain(*traced_.at(input), explanation);
    ASSERT_TRUE(explained.status.ok()) << explained.status;
    const bool second_tensor = variant->first == "attribution_without_self";
    ExpectNear(explained.tensors.at(second_tensor ? 1 : 0).values, F64(tensor), 5e-5, name);
    ++compared;
  }
  EXPECT_GT(compared, 0);
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenGradient, ::testing::ValuesIn(model::GoldenModels()),
                         model::TestNameOf);

// ---- identities on random models ----

class GradientProperties : public ::testing::TestWithParam<int> {
 protected:
  static testing::RandomModel Random(int seed) {
    testing::RandomModel random;
    const char* const families[] = {"mamba", "falcon_mamba", "mamba2", "vim", "mamba"};
    random.family = families[seed % 5];
    random.layers = 1 + seed % 4;
    random.d_conv = 1 + seed % 4;
    random.d_state = 3 + seed % 7;
    random.use_bias = seed % 2 == 1 && random.family != "vim";
    random.use_conv_bias = seed % 3 != 1 || random.vision();
    const char* const activations[] = {"silu", "relu", "identity"};
    random.conv_activation = activations[seed / 5 % 3];
    random.seed = 1000 + seed;
    if (random.family == "mamba2") random.d_model = 15;
    if (random.vision()) random.classes = 7;
    if (seed % 5 == 4) {
      random.classes = 6;
      random.pooling = seed % 2 == 0 ? "mean" : "last";
    }
    return random;
  }

  GradientProperties() : model_(testing::LoadRandomModel(Random(GetParam()))) {
    if (model_->config().task == model::Task::kImageClass) {
      std::mt19937_64 engine(GetParam());
      const int side = model_->config().vision.image_size;
      std::vector<float> image(3 * side * side);
      for (float& value : image) value = static_cast<float>(engine() % 2001) / 1000 - 1;
      traced_ = std::make_unique<Traced>(*model_, image);
    } else {
      traced_ = std::make_unique<Traced>(
          *model_, testing::RandomTokens(*model_, 1 + GetParam() * 7 % 40, GetParam()));
    }
  }

  explain::Subject Subject() {
    return traced_->SubjectAt(
        explain::PositionOf(v1::Explanation(), model_->config(), traced_->trace.tokens));
  }

  // f for embeddings moved by `step` along `direction`.
  double Value(const explain::Subject& subject, const std::vector<float>& embeddings,
               const std::vector<float>& direction, double step) {
    std::vector<float> moved(embeddings);
    for (size_t i = 0; i < moved.size(); ++i) {
      moved[i] = static_cast<float>(moved[i] + step * direction[i]);
    }
    model::RecurrentState state(model_->config());
    model::Piece piece;
    piece.embeddings = moved;
    piece.state = &state;
    const int32_t row = model_->config().mean_pooled() ? static_cast<int32_t>(subject.tokens - 1)
                                                       : subject.position;
    piece.logit_rows = std::span(&row, 1);
    std::vector<float> logits;
    piece.logits = &logits;
    model::Workspace workspace;
    EXPECT_TRUE(model_->Forward(traced_->pool, workspace, {&piece, 1}, [] { return false; }).ok());
    return ValueOf(subject, logits);
  }

  std::unique_ptr<const model::MambaModel> model_;
  std::unique_ptr<Traced> traced_;
};

TEST_P(GradientProperties, RelevanceIsConserved) {
  v1::Explanation explanation;
  explanation.mutable_mamba_lrp();
  const Explained explained = Explain(*traced_, explanation);
  ASSERT_TRUE(explained.status.ok());
  double sum = explained.quality.bias_relevance(), largest = 0.1;
  for (const float score : explained.values()) {
    sum += score;
    largest = std::max(largest, std::fabs(double{score}));
  }
  EXPECT_NEAR(sum, Subject().explained, 1e-4 * largest);
  EXPECT_TRUE(explained.quality.within_tolerance());
}

TEST_P(GradientProperties, TheGradientIsTheSlopeOfTheForwardPass) {
  if (model_->config().conv_activation == kernels::Activation::kRelu) return;  // kinks on the way
  for (const auto value : {v1::OUTPUT_VALUE_LOGIT, v1::OUTPUT_VALUE_LOG_PROBABILITY}) {
    explain::Subject subject = Subject();
    subject.value = value;
    explain::GradientWalk walk(subject, BackwardRule::kGradient, 1);
    while (!walk.done()) ASSERT_TRUE(walk.Step().ok());
    const int64_t values = subject.tokens * model_->config().d_model;
    std::vector<float> embeddings(values), direction(values);
    model_->Embed(traced_->pool, subject.token_ids, subject.image, embeddings);
    std::mt19937_64 engine(7);
    double along = 0, length = 0;
    for (int64_t i = 0; i < values; ++i) {
      direction[i] = static_cast<float>(engine() % 2001) / 1000 - 1;
      along += double{direction[i]} * walk.result().embeddings[i];
      length += std::pow(walk.result().embeddings[i], 2);
    }
    // Central difference in fp32: its rounding allows about three digits.
    constexpr double kStep = 4e-3;
    const double slope = (Value(subject, embeddings, direction, kStep) -
                          Value(subject, embeddings, direction, -kStep)) /
                         (2 * kStep);
    EXPECT_NEAR(along, slope, 2e-2 * std::max(std::sqrt(length), 0.1)) << value;
  }
}

TEST_P(GradientProperties, IntegratedGradientsCompleteWithTheirSteps) {
  if (GetParam() % 3 != 0 || model_->config().conv_activation == kernels::Activation::kRelu) return;
  double gap[2];
  for (const int many : {0, 1}) {
    v1::Explanation explanation;
    auto* options = explanation.mutable_integrated_gradients();
    options->set_steps(many == 1 ? 128 : 8);
    if (model_->config().task != model::Task::kImageClass) options->set_baseline_token_id(2);
    const Explained explained = Explain(*traced_, explanation);
    ASSERT_TRUE(explained.status.ok()) << explained.status;
    const v1::Quality::Completeness& completeness = explained.quality.completeness();
    gap[many] = std::fabs(completeness.sum() - completeness.expected());
  }
  EXPECT_LE(gap[1], std::max(0.3 * gap[0], 5e-3));
}

TEST_P(GradientProperties, ABaselineOfTokensIsReadUpToTheTarget) {
  const int64_t L = traced_->trace.tokens;
  if (model_->config().task != model::Task::kNextToken) return;
  v1::Explanation same, listed;
  same.mutable_integrated_gradients()->set_baseline_token_id(2);
  for (int64_t j = 0; j < L; ++j) {
    listed.mutable_integrated_gradients()->mutable_baseline_token_ids()->add_ids(2);
  }
  for (v1::Explanation* explanation : {&same, &listed}) {
    explanation->mutable_integrated_gradients()->set_steps(2);
    explanation->mutable_target()->set_position(static_cast<int32_t>(L / 3));
  }
  EXPECT_EQ(Explain(*traced_, listed).values(), Explain(*traced_, same).values());
}

TEST_P(GradientProperties, AttributionWithoutItsIdentityIsNeverNegative) {
  for (const auto normalization :
       {v1::AttentionRollout::NORMALIZATION_PAPER, v1::AttentionRollout::NORMALIZATION_ROW_SUM}) {
    v1::Explanation explanation;
    explanation.mutable_mamba_attribution()->set_normalization(normalization);
    const Explained explained = Explain(*traced_, explanation);
    ASSERT_TRUE(explained.status.ok());
    const std::vector<float>& all = explained.tensors.at(0).values;
    const std::vector<float>& others = explained.tensors.at(1).values;
    double sum = 0;
    for (size_t j = 0; j < all.size(); ++j) {
      EXPECT_GE(others[j], 0);
      EXPECT_LE(others[j], all[j]);
      sum += all[j];
    }
    if (normalization != v1::AttentionRollout::NORMALIZATION_ROW_SUM) continue;
    EXPECT_NEAR(sum, 1, 1e-4);
  }
}

TEST_P(GradientProperties, AContrastIsTheDifferenceOfTwoTargets) {
  for (const bool relevance : {false, true}) {
    v1::Explanation explanation;
    relevance ? (void)explanation.mutable_mamba_lrp()
              : (void)explanation.mutable_gradient_x_input();
    traced_->token = 1, traced_->contrast = -1;
    const std::vector<float> one = Explain(*traced_, explanation).values();
    traced_->token = 3;
    const std::vector<float> other = Explain(*traced_, explanation).values();
    traced_->token = 1, traced_->contrast = 3;
    const std::vector<float> both = Explain(*traced_, explanation).values();
    for (size_t j = 0; j < one.size(); ++j) {
      EXPECT_NEAR(both[j], one[j] - other[j],
                  1e-4 * std::max({0.1f, std::fabs(one[j]), std::fabs(other[j])}));
    }
  }
}

TEST_P(GradientProperties, StreamsRecomputedOrThreadsChangeNoBit) {
  if (model_->config().task == model::Task::kImageClass) return;  // the same code
  for (const BackwardRule rule : {BackwardRule::kGradient, BackwardRule::kRelevance}) {
    explain::Subject subject = Subject();
    explain::GradientWalk recorded(subject, rule, 1);
    while (!recorded.done()) ASSERT_TRUE(recorded.Step().ok());

    ThreadPool one(1);
    model::SequenceTrace sparse =
        model::SequenceTrace::StreamsOnly(model_->config(), subject.tokens, /*stream_stride=*/2);
    model::RecurrentState state(model_->config());
    model::Piece piece;
    piece.tokens = subject.token_ids;
    piece.state = &state;
    piece.trace = &sparse;
    model::Workspace workspace;
    ASSERT_TRUE(model_->Forward(one, workspace, {&piece, 1}, [] { return false; }).ok());
    subject.trace = &sparse;
    subject.pool = &one;
    explain::GradientWalk walked(subject, rule, 2);
    int32_t steps = 0;
    for (; !walked.done(); ++steps) ASSERT_TRUE(walked.Step().ok());
    EXPECT_EQ(steps, explain::GradientWalk::Slices(model_->config(), 2));
    EXPECT_EQ(walked.result().embeddings, recorded.result().embeddings);
    EXPECT_EQ(walked.result().gated_mean, recorded.result().gated_mean);
  }
}

TEST_P(GradientProperties, AllRowsAreTheRowsOfTheirTargets) {
  const model::ModelConfig& config = model_->config();
  if (config.task != model::Task::kNextToken) return;
  v1::Explanation all;
  all.mutable_gradient_x_input()->set_rows(v1::ROWS_ALL);
  const Explained rows = Explain(*traced_, all);
  ASSERT_TRUE(rows.status.ok());
  const int64_t L = traced_->trace.tokens;
  for (int64_t i = 0; i < L; i += 3) {
    v1::Explanation one;
    one.mutable_gradient_x_input();
    one.mutable_target()->set_position(static_cast<int32_t>(i));
    const std::vector<float> row = Explain(*traced_, one).values();
    EXPECT_EQ(row, std::vector<float>(rows.values().begin() + i * L,
                                      rows.values().begin() + (i + 1) * L));
    for (int64_t j = i + 1; j < L; ++j) EXPECT_EQ(row[j], 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, GradientProperties, ::testing::Range(0, 60));

}  // namespace
}  // namespace mambascope
