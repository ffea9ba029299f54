// LaTIM: every golden of it, and what must hold for any model.
#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>

#include <string>
#include <vector>

#include "server/explain/latim_layer.h"
#include "server/explain/latim_target.h"
#include "server/explain/stream_steps.h"
#include "server/kernels/gemm.h"
#include "server/model/stream_walk.h"
#include "tests/explain/latim_support.h"

namespace mambascope {
namespace {

using testing::ExpectClose;
using testing::Explained;
using testing::ExplainSubject;
using testing::F64;
using testing::Tensor;
using testing::Traced;
using v1::Latim;

constexpr int kSeeds = 63;
constexpr double kRounding = 5e-5;  // class M of the goldens

v1::Explanation Options(Latim::Norm norm, Latim::Activation activation = Latim::ACTIVATION_GATE,
                        v1::Rows rows = v1::ROWS_UNSPECIFIED) {
  v1::Explanation explanation;
  explanation.mutable_latim()->set_norm(norm);
  explanation.mutable_latim()->set_activation(activation);
  explanation.mutable_latim()->set_rows(rows);
  return explanation;
}

Latim::Activation ActivationNamed(const std::string& name) {
  if (name == "silu") return Latim::ACTIVATION_SILU;
  if (name == "relu") return Latim::ACTIVATION_RELU;
  return name == "gate" ? Latim::ACTIVATION_GATE : Latim::ACTIVATION_IDENTITY;
}

std::vector<float> Slice(const std::vector<float>& values, int64_t size, int64_t index) {
  return {values.begin() + index * size, values.begin() + (index + 1) * size};
}

// T_i(x_j) [L, L, d_model] and constants [L, d_model] of one layer.
struct Contributions {
  Contributions(Traced& traced, int32_t layer) {
    const model::ModelConfig& config = traced.model().config();
    const int64_t L = traced.trace.tokens, M = config.d_model, D = config.d_inner;
    T.assign(L * L * M, 0);
    constant.assign(L * M, 0);
    explain::LatimLayer opened(config, Latim::ACTIVATION_GATE, L);
    const explain::Subject subject = traced.SubjectAt(
        config.family == model::Family::kVim ? config.vision.class_position() : L - 1);
    opened.Open(subject, layer, traced.trace.stream(layer));
    std::vector<float> inputs(L * D);
    const auto project = [&](int64_t rows, const float* bias, float* out) {
      kernels::Linear(traced.pool, {inputs.data(), rows, D, D}, opened.weights().out_proj, bias,
                      {out, rows, M, M});
    };
    for (int64_t i = 0, block = 0; i < L; i += block) {
      block = opened.BlockRows(L - i);
      opened.OpenRows(i, block, nullptr);
      for (int64_t r = i; r < i + block; ++r) {
        opened.Inputs(r, 0, opened.ReadTo(r), false, inputs.data());
        project(opened.ReadTo(r), nullptr, T.data() + r * L * M);
        opened.Constant(r, false, inputs.data());
        project(1, opened.weights().out_proj_bias, constant.data() + r * M);
      }
    }
  }
  std::vector<float> T, constant;
};

// ---- goldens ----

class LatimGolden : public ::testing::TestWithParam<std::string> {
 protected:
  testing::GoldenModel golden_{GetParam()};
};

TEST_P(LatimGolden, ContributionsNormsAndShares) {
  int compared = 0;
  for (const auto& [name, tensor] : golden_.Read("latim.safetensors")) {
    SCOPED_TRACE(name);
    const std::string input = name.substr(0, name.find('/'));
    const std::string rest = name.substr(input.size() + 1);
    if (rest.substr(0, 5) != "layer") continue;
    Traced& traced = golden_.At(input);
    const int64_t L = traced.trace.tokens;
    const int layer = std::stoi(rest.substr(5));
    const std::string what = rest.substr(rest.find('/') + 1);
    const std::string measure = what.substr(what.find('/') + 1);
    ++compared;
    if (measure == "T" || measure == "const") {
      const Contributions contributions(traced, layer);
      golden_.Compare(measure == "T" ? contributions.T : contributions.constant, F64(tensor), 'M');
      continue;
    }
    const auto activation = ActivationNamed(what.substr(0, what.find('/')));
    const Latim::Norm norm = measure == "l1"   ? Latim::NORM_L1
                             : measure == "l2" ? Latim::NORM_L2
                                               : Latim::NORM_ALTI;
    v1::Explanation explanation = Options(norm, activation, v1::ROWS_ALL);
    explanation.mutable_latim()->set_alti_residual(measure == "alti");
    auto* range = explanation.mutable_latim()->add_layers();
    range->set_begin(layer);
    range->set_end(layer + 1);
    const Explained all = Explain(traced, explanation);
    ASSERT_TRUE(all.status.ok()) << all.status;
    golden_.Compare(all.values(), F64(tensor), norm == Latim::NORM_ALTI ? 'R' : 'M');
    EXPECT_TRUE(all.tensors[0].info.nonnegative());

    explanation.mutable_latim()->set_rows(v1::ROWS_TARGET);
    std::vector<double> expected(L, 0);
    const std::vector<float> weights = explain::RowWeights(
        traced.SubjectAt(explain::PositionOf(explanation, golden_.model().config(), L)));
    for (int64_t i = 0; i < L; ++i) {
      for (int64_t j = 0; j < L; ++j) expected[j] += weights[i] * F64(tensor)[i * L + j];
    }
    golden_.Compare(Explain(traced, explanation).values(), expected,
                    norm == Latim::NORM_ALTI ? 'R' : 'M');
  }
  EXPECT_GT(compared, 40);
}

TEST_P(LatimGolden, Errors) {
  for (const auto& [name, tensor] : golden_.Read("latim.safetensors")) {
    if (name.find("/error_") == std::string::npos) continue;
    SCOPED_TRACE(name);
    Traced& traced = golden_.At(name.substr(0, name.find('/')));
    const int64_t L = traced.trace.tokens;
    const std::vector<double> errors = F64(tensor);
    const auto activation = ActivationNamed(name.substr(name.find("/error_") + 7));
    const Explained all = Explain(traced, Options(Latim::NORM_L1, activation, v1::ROWS_ALL));
    const auto& decomposition = all.quality.decomposition();
    ASSERT_EQ(decomposition.layers_size(), static_cast<int>(errors.size()) / L);
    std::vector<double> largest;
    for (int l = 0; l < decomposition.layers_size(); ++l) {
      largest.push_back(*std::max_element(errors.begin() + l * L, errors.begin() + (l + 1) * L));
    }
    golden_.Compare({decomposition.relative_error_by_layer().begin(),
                     decomposition.relative_error_by_layer().end()},
                    largest, 'P');
    const bool within = *std::max_element(largest.begin(), largest.end()) < 1e-3;
    EXPECT_EQ(all.quality.within_tolerance(), within);
    EXPECT_TRUE(within || activation != Latim::ACTIVATION_GATE);
  }
}

TEST_P(LatimGolden, RolloutAndLogit) {
  int compared = 0;
  for (const auto& [name, tensor] : golden_.Read("latim.safetensors")) {
    SCOPED_TRACE(name);
    const std::string input = name.substr(0, name.find('/'));
    const std::string rest = name.substr(input.size() + 1);
    if (rest.substr(0, 8) == "rollout_") {
      Traced& traced = golden_.At(input);
      v1::Explanation explanation =
          Options(Latim::NORM_ALTI_ROLLOUT, ActivationNamed(rest.substr(8)), v1::ROWS_ALL);
      golden_.Compare(Explain(traced, explanation).values(), F64(tensor), 'R');
      ++compared;
    }
    if (rest.substr(0, 11) != "alti_logit_") continue;
    const std::string what = rest.substr(rest.find('/') + 1);
    Traced& traced = golden_.At(input, what.substr(0, 8) == "contrast");
    const std::string measure = what.substr(what.find('/') + 1);
    const auto activation = ActivationNamed(rest.substr(11, rest.find('/') - 11));
    const Explained explained = Explain(traced, Options(Latim::NORM_ALTI_LOGIT, activation));
    ASSERT_TRUE(explained.status.ok()) << explained.status;
    golden_.Compare(Tensor(explained, measure == "tokens" ? "latim" : measure).values, F64(tensor),
                    'M');
    if (activation == Latim::ACTIVATION_GATE) {
      EXPECT_TRUE(explained.quality.within_tolerance()) << explained.quality.ShortDebugString();
      EXPECT_LT(explained.quality.completeness().relative_error(), 1e-5);
    }
    ++compared;
  }
  EXPECT_GT(compared, 40);
}

INSTANTIATE_TEST_SUITE_P(Models, LatimGolden, ::testing::ValuesIn(model::GoldenModels()),
                         model::TestNameOf);

// ---- identities ----

class LatimProperties : public ::testing::TestWithParam<int> {
 protected:
  LatimProperties()
      : model_(testing::LoadRandomModel(testing::RandomOfAnyKind(GetParam()))),
        traced_(testing::TraceRandom(*model_, GetParam())),
        L_(traced_->trace.tokens),
        causal_(model_->config().family != model::Family::kVim),
        one_position_(!model_->config().mean_pooled() && causal_) {}

  Explained Run(const v1::Explanation& explanation) {
    Explained explained = Explain(*traced_, explanation);
    EXPECT_TRUE(explained.status.ok()) << explained.status;
    return explained;
  }
  std::vector<float> Weights() {
    return explain::RowWeights(traced_->SubjectAt(explain::PositionOf({}, model_->config(), L_)));
  }

  const std::unique_ptr<const model::MambaModel> model_;
  const std::unique_ptr<Traced> traced_;
  const int64_t L_;
  const bool causal_, one_position_;
};

TEST_P(LatimProperties, ContributionsAndConstantSumToTheMixersOutput) {
  const int64_t M = model_->config().d_model;
  for (int32_t layer = 0; layer < model_->config().layers; ++layer) {
    const Contributions contributions(*traced_, layer);
    std::vector<double> sum(contributions.constant.begin(), contributions.constant.end());
    std::vector<double> out(L_ * M);
    for (int64_t e = 0; e < L_ * M; ++e) {
      out[e] = double{traced_->trace.stream(layer + 1)[e]} - traced_->trace.stream(layer)[e];
      for (int64_t j = 0; j < L_; ++j) sum[e] += contributions.T[(e / M * L_ + j) * M + e % M];
    }
    ExpectClose(sum, out, kRounding);
  }
  for (const auto norm : {Latim::NORM_L2, Latim::NORM_ALTI}) {
    const Explained all = Run(Options(norm, Latim::ACTIVATION_GATE, v1::ROWS_ALL));
    EXPECT_TRUE(all.quality.within_tolerance()) << all.quality.ShortDebugString();
    EXPECT_EQ(all.quality.decomposition().layers_size(), model_->config().layers);
  }
}

TEST_P(LatimProperties, GateIsExactWhereTheModelsActivationIsReadAsItIs) {
  if (model_->config().conv_activation != kernels::Activation::kIdentity) return;
  const Explained gate = Run(Options(Latim::NORM_L2, Latim::ACTIVATION_GATE, v1::ROWS_ALL));
  const Explained identity = Run(Options(Latim::NORM_L2, Latim::ACTIVATION_IDENTITY, v1::ROWS_ALL));
  EXPECT_EQ(gate.values(), identity.values());
}

TEST_P(LatimProperties, SharesSumToOneAndMapsAreCausal) {
  for (const auto norm :
       {Latim::NORM_L1, Latim::NORM_L2, Latim::NORM_ALTI, Latim::NORM_ALTI_ROLLOUT}) {
    SCOPED_TRACE(Latim::Norm_Name(norm));
    const Explained all = Run(Options(norm, Latim::ACTIVATION_SILU, v1::ROWS_ALL));
    for (size_t row = 0; row < all.values().size() / L_; ++row) {
      double sum = 0;
      for (int64_t j = 0; j < L_; ++j) {
        const float value = all.values()[row * L_ + j];
        ASSERT_GE(value, 0);
        sum += value;
        ASSERT_TRUE(!causal_ || j <= static_cast<int64_t>(row) % L_ || value == 0);
      }
      if (norm == Latim::NORM_ALTI || norm == Latim::NORM_ALTI_ROLLOUT) {
        ASSERT_NEAR(sum, 1, 1e-5);
      }
    }
  }
}

TEST_P(LatimProperties, ATargetsRowIsTheRowOfTheMap) {
  const int64_t layers = model_->config().layers;
  for (const auto norm :
       {Latim::NORM_L1, Latim::NORM_L2, Latim::NORM_ALTI, Latim::NORM_ALTI_ROLLOUT}) {
    SCOPED_TRACE(Latim::Norm_Name(norm));
    v1::Explanation explanation = Options(norm, Latim::ACTIVATION_GATE, v1::ROWS_ALL);
    const Explained all = Run(explanation);
    const bool joined = norm == Latim::NORM_ALTI_ROLLOUT;
    for (const int64_t target : {int64_t{0}, L_ / 2, L_ - 1}) {
      if (!one_position_ && target != L_ - 1) continue;
      explanation.mutable_latim()->clear_rows();
      if (one_position_) explanation.mutable_target()->set_position(static_cast<int32_t>(target));
      const Explained row = Run(explanation);
      std::vector<float> weights = Weights();
      if (one_position_) {
        weights.assign(L_, 0);
        weights[target] = 1;
      }
      for (int64_t map = 0; map < (joined ? 1 : layers); ++map) {
        std::vector<double> expected(L_, 0);
        for (int64_t i = 0; i < L_; ++i) {
          for (int64_t j = 0; j < L_; ++j) {
            expected[j] += double{weights[i]} * all.values()[(map * L_ + i) * L_ + j];
          }
        }
        ExpectClose(Slice(row.values(), L_, map), expected, joined ? 1e-4 : kRounding);
        if (!joined && one_position_) {  // the same bits
          EXPECT_EQ(Slice(row.values(), L_, map), Slice(all.values(), L_, map * L_ + target));
        }
      }
    }
  }
}

TEST_P(LatimProperties, LogitPartsSumToTheLogit) {
  traced_->contrast = GetParam() % 2 == 0 ? -1 : GetParam() % model_->config().outputs();
  const Explained explained = Run(Options(Latim::NORM_ALTI_LOGIT));
  const auto& completeness = explained.quality.completeness();
  EXPECT_LT(completeness.relative_error(), 1e-5);
  EXPECT_TRUE(explained.quality.within_tolerance());
  const double around =
      Tensor(explained, "embedding").values[0] + double{Tensor(explained, "constant").values[0]};
  double tokens = around, edges = around, own = 0;
  for (const float part : explained.values()) tokens += part;
  for (const float part : Tensor(explained, "per_layer").values) edges += part;
  for (const float part : Tensor(explained, "embedding_tokens").values) own += part;
  const double f = traced_->SubjectAt(explain::PositionOf({}, model_->config(), L_)).explained;
  const double bound = kRounding * std::max(1.0, std::fabs(f));
  EXPECT_NEAR(tokens, f, bound);
  EXPECT_NEAR(edges, f, bound);
  EXPECT_NEAR(own, Tensor(explained, "embedding").values[0], bound);
}

// r = sum_l delta^l R^l with R from the maps, and the joined map from the same.
TEST_P(LatimProperties, JoinedLayersAreTheProductOfTheirMaps) {
  const int64_t layers = model_->config().layers;
  v1::Explanation alti = Options(Latim::NORM_ALTI, Latim::ACTIVATION_GATE, v1::ROWS_ALL);
  alti.mutable_latim()->set_alti_residual(true);
  const std::vector<float> maps = Run(alti).values();
  const Explained logit = Run(Options(Latim::NORM_ALTI_LOGIT));
  const std::vector<float>& per_layer = Tensor(logit, "per_layer").values;
  std::vector<double> R(L_ * L_, 0), tokens(L_, 0);
  for (int64_t i = 0; i < L_; ++i) R[i * L_ + i] = 1;
  for (int64_t l = 0; l < layers; ++l) {
    std::vector<double> next(L_ * L_, 0);
    for (int64_t i = 0; i < L_; ++i) {
      for (int64_t j = 0; j < L_; ++j) {
        tokens[j] += per_layer[l * L_ + i] * R[i * L_ + j];
        for (int64_t k = 0; k < L_; ++k) {
          next[i * L_ + j] += maps[(l * L_ + i) * L_ + k] * R[k * L_ + j];
        }
      }
    }
    R = next;
  }
  ExpectClose(logit.values(), tokens, kRounding);
  ExpectClose(Run(Options(Latim::NORM_ALTI_ROLLOUT, Latim::ACTIVATION_GATE, v1::ROWS_ALL)).values(),
              R, kRounding);
}

TEST_P(LatimProperties, AContrastIsTheDifferenceOfTwoTargets) {
  const int32_t outputs = model_->config().outputs();
  const auto explain = [&](int32_t token, int32_t contrast) {
    traced_->token = token;
    traced_->contrast = contrast;
    return Run(Options(Latim::NORM_ALTI_LOGIT));
  };
  const Explained first = explain(0, -1), second = explain(outputs - 1, -1);
  const Explained difference = explain(0, outputs - 1);
  for (size_t t = 0; t < difference.tensors.size(); ++t) {
    std::vector<double> expected;
    for (size_t e = 0; e < difference.tensors[t].values.size(); ++e) {
      expected.push_back(double{first.tensors[t].values[e]} - second.tensors[t].values[e]);
    }
    ExpectClose(difference.tensors[t].values, expected, kRounding);
  }
}

TEST_P(LatimProperties, LaterTokensChangeNoBit) {
  if (!one_position_ || model_->config().classes > 0 || L_ < 3) return;
  std::vector<int32_t> tokens = testing::RandomTokens(*model_, L_, GetParam());
  tokens.resize(L_ - 2);
  Traced shorter(*model_, tokens);
  for (const auto norm : {Latim::NORM_L1, Latim::NORM_ALTI_LOGIT, Latim::NORM_ALTI_ROLLOUT}) {
    v1::Explanation explanation = Options(norm);
    const std::vector<float> alone = Explain(shorter, explanation).values();
    explanation.mutable_target()->set_position(static_cast<int32_t>(L_ - 3));
    const std::vector<float> within = Run(explanation).values();
    for (size_t row = 0; row < within.size() / L_; ++row) {
      const std::vector<float> values = Slice(within, L_, row);
      EXPECT_EQ(std::vector<float>(values.begin(), values.end() - 2), Slice(alone, L_ - 2, row));
      EXPECT_EQ(values[L_ - 1], 0);
      EXPECT_EQ(values[L_ - 2], 0);
    }
  }
}

TEST_P(LatimProperties, ThreadsAndSparseStreamsChangeNoBit) {
  for (const auto norm : {Latim::NORM_L2, Latim::NORM_ALTI_LOGIT, Latim::NORM_ALTI_ROLLOUT}) {
    const v1::Explanation explanation =
        Options(norm, Latim::ACTIVATION_SILU,
                norm == Latim::NORM_ALTI_LOGIT ? v1::ROWS_UNSPECIFIED : v1::ROWS_ALL);
    explain::Subject subject =
        traced_->SubjectAt(explain::PositionOf(explanation, model_->config(), L_));
    const Explained once = ExplainSubject(subject, explanation);
    model::SequenceTrace sparse(model_->config(), L_, 2);
    sparse.tokens = L_;
    for (int32_t l = 0; l <= model_->config().layers; ++l) {
      if (sparse.stream(l) == nullptr) continue;
      std::copy_n(traced_->trace.stream(l), L_ * model_->config().d_model, sparse.stream(l));
    }
    for (const int threads : {1, 3}) {
      ThreadPool pool(threads);
      subject.pool = &pool;
      subject.trace = threads == 1 ? &sparse : &traced_->trace;
      const Explained again = ExplainSubject(subject, explanation);
      ASSERT_TRUE(again.status.ok()) << again.status;
      for (size_t t = 0; t < once.tensors.size(); ++t) {
        EXPECT_EQ(once.tensors[t].bytes, again.tensors[t].bytes);
      }
      EXPECT_EQ(once.quality.SerializeAsString(), again.quality.SerializeAsString());
    }
  }
}

// f of a span is the sum over its tokens, a map's row the mean of their rows.
TEST_P(LatimProperties, Spans) {
  if (!one_position_ || model_->config().classes > 0 || L_ < 5) return;
  v1::Explanation explanation = Options(Latim::NORM_ALTI_LOGIT);
  explanation.mutable_target()->set_generated(1);
  explanation.mutable_target()->set_generated_end(4);
  explain::Subject subject = traced_->SubjectAt(L_ - 1);
  subject.outputs.clear();
  subject.explained = 0;
  std::vector<double> rows(L_, 0);
  for (int32_t k = 0; k < 3; ++k) {
    const auto position = static_cast<int32_t>(L_ - 3 + k);
    subject.outputs.push_back({position, 5 + k, -1});
    subject.explained += traced_->LogitsAt(position)[5 + k];
  }
  const Explained logit = ExplainSubject(subject, explanation);
  ASSERT_TRUE(logit.status.ok()) << logit.status;
  EXPECT_LT(logit.quality.completeness().relative_error(), 1e-5);
  for (const auto norm : {Latim::NORM_L2, Latim::NORM_ALTI_ROLLOUT}) {
    explanation.mutable_latim()->set_norm(norm);
    const Explained row = ExplainSubject(subject, explanation);
    const std::vector<float> all =
        Run(Options(norm, Latim::ACTIVATION_GATE, v1::ROWS_ALL)).values();
    std::vector<double> expected(row.values().size(), 0);
    for (size_t e = 0; e < expected.size(); ++e) {
      const int64_t map = static_cast<int64_t>(e) / L_, j = static_cast<int64_t>(e) % L_;
      for (int64_t i = L_ - 3; i < L_; ++i) expected[e] += all[(map * L_ + i) * L_ + j] / 3.0;
    }
    ExpectClose(row.values(), expected, kRounding);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, LatimProperties, ::testing::Range(0, kSeeds));

TEST(LatimWalk, RecomputedLayersAreWhatAWalkRecomputes) {
  testing::RandomModel random;
  random.layers = 7;
  const auto model = testing::LoadRandomModel(random);
  Traced traced(*model, testing::RandomTokens(*model, 3, 1));
  const std::vector<std::vector<int32_t>> walks = {
      {0, 1, 2, 3, 4, 5, 6}, {6, 5, 4, 3, 2, 1, 0}, {1, 4, 5}, {5}, {2, 6}, {0, 3}, {6, 2}};
  for (const int32_t stride : {1, 2, 3, 4}) {
    model::SequenceTrace sparse(model->config(), 3, stride);
    sparse.tokens = 3;
    for (int32_t l = 0; l <= 7; ++l) {
      if (sparse.stream(l) == nullptr) continue;
      std::copy_n(traced.trace.stream(l), 3 * random.d_model, sparse.stream(l));
    }
    for (const std::vector<int32_t>& layers : walks) {
      model::StreamWalk walk(*model, sparse, 3);
      int32_t recomputed = 0;
      for (const int32_t layer : layers) {
        while (!walk.Prepare(traced.pool, layer)) ++recomputed;
      }
      EXPECT_EQ(explain::RecomputedLayers(layers, stride), recomputed) << stride;
    }
  }
}

// So many layers that a plan counts on recorded streams of every seventh alone.
TEST(LatimWalk, SparseStreamsTakeAsManySlicesAsPlanned) {
  testing::RandomModel random;
  random.d_model = 4096;
  random.d_inner = 8;
  random.d_state = 2;
  random.layers = 45;
  const auto model = testing::LoadRandomModel(random);
  Traced traced(*model, testing::RandomTokens(*model, 96, 1));
  const int32_t stride = model::SequenceTrace::StreamStride(model->config(), 96);
  ASSERT_EQ(stride, 7);
  model::SequenceTrace sparse(model->config(), 96, stride);
  sparse.tokens = 96;
  for (int32_t l = 0; l <= random.layers; ++l) {
    if (sparse.stream(l) == nullptr) continue;
    std::copy_n(traced.trace.stream(l), 96 * random.d_model, sparse.stream(l));
  }
  std::vector<v1::Explanation> explanations = {Options(Latim::NORM_ALTI_LOGIT),
                                               Options(Latim::NORM_ALTI_ROLLOUT),
                                               Options(Latim::NORM_L1),
                                               Options(Latim::NORM_L1),
                                               {},
                                               {},
                                               {}};
  explanations[3].mutable_latim()->add_layers()->set_begin(40);
  explanations[4].mutable_logit_lens();
  explanations[5].mutable_edge_lens();
  explanations[6].mutable_logit_lens()->add_layers()->set_begin(44);
  for (const v1::Explanation& explanation : explanations) {
    SCOPED_TRACE(explanation.ShortDebugString());
    explain::Subject subject = traced.SubjectAt(95);
    const Explained recorded = ExplainSubject(subject, explanation);
    subject.trace = &sparse;
    const Explained recomputed = ExplainSubject(subject, explanation);
    ASSERT_TRUE(recomputed.status.ok()) << recomputed.status;
    for (size_t t = 0; t < recorded.tensors.size(); ++t) {
      EXPECT_EQ(recorded.tensors[t].bytes, recomputed.tensors[t].bytes);
    }
  }
}

// ---- what is refused ----

using Found = std::vector<std::pair<std::string, std::string>>;

Found Faults(const std::string& text) {
  v1::Explanation explanation;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &explanation)) << text;
  model::ModelConfig config;
  config.vocabulary = 100;
  config.layers = 6;
  explain::Violations violations;
  explain::FindMethod(explain::MethodName(explanation))
      ->Validate(explanation, config, 10, "explanations[0].latim", violations);
  return violations.list();
}

TEST(LatimValidation, RightOptionsPass) {
  for (const char* text : {
           "latim { }",
           "latim { norm: NORM_ALTI_LOGIT activation: ACTIVATION_RELU }",
           "latim { norm: NORM_ALTI alti_residual: true layers { begin: 1 end: 2 } }",
           "latim { norm: NORM_L1 rows: ROWS_ALL layers { begin: 4 } layers { end: 2 } }",
           "latim { norm: NORM_ALTI_ROLLOUT rows: ROWS_ALL }",
           "target { value: OUTPUT_VALUE_LOGIT } latim { norm: NORM_L2 rows: ROWS_TARGET }",
       }) {
    EXPECT_THAT(Faults(text), ::testing::IsEmpty()) << text;
  }
}

TEST(LatimValidation, EachFault) {
  struct Case {
    const char *text, *field, *description;
  };
  for (const Case& c : std::vector<Case>{
           {"target { value: OUTPUT_VALUE_LOG_PROBABILITY } latim { }",
            "explanations[0].target.value", "gradient_x_input"},
           {"latim { norm: 9 }", "explanations[0].latim.norm", "9 is not one"},
           {"latim { activation: 9 }", "explanations[0].latim.activation", "9 is not one"},
           {"latim { norm: NORM_L1 rows: 9 }", "explanations[0].latim.rows", "9 is not one"},
           {"latim { norm: NORM_L1 alti_residual: true }", "explanations[0].latim.alti_residual",
            "is for NORM_ALTI only"},
           {"latim { alti_residual: true }", "explanations[0].latim.alti_residual",
            "always has the residual"},
           {"latim { layers { begin: 1 } }", "explanations[0].latim.layers",
            "NORM_ALTI_LOGIT, which needs all layers"},
           {"latim { norm: NORM_ALTI_ROLLOUT layers { } }", "explanations[0].latim.layers",
            "NORM_ALTI_ROLLOUT, which needs all layers"},
           {"latim { norm: NORM_L2 layers { begin: 6 } }", "explanations[0].latim.layers[0].begin",
            "6 is outside [0, 6)"},
           {"latim { rows: ROWS_ALL }", "explanations[0].latim.rows", "NORM_ALTI_ROLLOUT has rows"},
           {"latim { norm: NORM_ALTI_LOGIT rows: ROWS_TARGET }", "explanations[0].latim.rows",
            "ROWS_TARGET does not go with NORM_ALTI_LOGIT"},
       }) {
    EXPECT_THAT(Faults(c.text), ::testing::ElementsAre(
                                    ::testing::Pair(c.field, ::testing::HasSubstr(c.description))))
        << c.text;
  }
}

}  // namespace
}  // namespace mambascope
