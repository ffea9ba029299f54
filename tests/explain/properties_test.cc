// What must hold for any model: identities between what the methods give, against the definitions
// spelled out in double.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "gtest/gtest.h"
#include "server/explain/half.h"
#include "tests/explain/explained.h"
#include "tests/explain/properties.h"

namespace mambascope {
namespace {

using testing::AllReductions;
using testing::ExpectNear;
using testing::Explained;
using testing::How;
using testing::kRounding;
using testing::kSeeds;
using testing::Properties;
using testing::RandomModel;
using testing::Reference;
using testing::Row;
using testing::Set;
using testing::Traced;
using Rollout = v1::AttentionRollout;

TEST_P(Properties, ReducedMapsAreTheirDefinitionAndCausal) {
  const Reference reference(*traced_);
  for (const How& how : AllReductions(model_->config())) {
    SCOPED_TRACE(v1::Reduction_Name(how.reduction));
    v1::Explanation explanation;
    Set(how, explanation.mutable_hidden_attention());
    const Explained explained = Explain(*traced_, explanation);
    ASSERT_TRUE(explained.status.ok()) << explained.status;
    EXPECT_TRUE(explained.quality.within_tolerance()) << explained.quality.ShortDebugString();
    EXPECT_EQ(explained.quality.reconstruction().layers_size(), model_->config().layers);
    EXPECT_EQ(explained.quality.reconstruction().rows_compared(), L_);
    const auto maps = static_cast<int64_t>(explained.values().size()) / (L_ * L_);
    for (int64_t map = 0; map < maps; ++map) {
      const std::vector<float> values = {explained.values().begin() + map * L_ * L_,
                                         explained.values().begin() + (map + 1) * L_ * L_};
      for (int64_t i = 0; i < L_; ++i) {
        for (int64_t j = i + 1; causal() && j < L_; ++j) ASSERT_EQ(values[i * L_ + j], 0);
      }
      const bool by_channel = how.reduction == v1::REDUCTION_CHANNELS;
      ExpectNear(values,
                 by_channel
                     ? reference.Alpha(static_cast<int32_t>(map / 3), how.channels[map % 3])
                     : reference.Reduced(static_cast<int32_t>(map), how.reduction, {}, how.top_k),
                 kRounding);
    }
  }
}

TEST_P(Properties, ATargetsRowIsTheRowOfTheMap) {
  for (const int64_t target : Targets()) {
    SCOPED_TRACE(target);
    for (const How& how : AllReductions(model_->config())) {
      SCOPED_TRACE(v1::Reduction_Name(how.reduction));
      v1::Explanation explanation;
      if (!pooled()) explanation.mutable_target()->set_position(static_cast<int32_t>(target));
      Set(how, explanation.mutable_hidden_attention());
      const Explained all = Explain(*traced_, explanation);
      explanation.mutable_hidden_attention()->set_rows(v1::ROWS_TARGET);
      const Explained row = Explain(*traced_, explanation);
      ASSERT_TRUE(row.status.ok()) << row.status;
      EXPECT_TRUE(row.quality.within_tolerance()) << row.quality.ShortDebugString();
      EXPECT_EQ(row.quality.reconstruction().rows_compared(), 1);
      std::vector<float> expected;
      for (size_t map = 0; map < all.values().size() / (L_ * L_); ++map) {
        const std::vector<float> one = TargetRow(all.values(), map, target);
        expected.insert(expected.end(), one.begin(), one.end());
      }
      ExpectNear(row.values(), expected, kRounding);
      for (size_t e = 0; e < row.values().size(); ++e) {
        const bool later = causal() && static_cast<int64_t>(e) % L_ > target;
        ASSERT_TRUE(!later || row.values()[e] == 0);
      }
      if (how.reduction == v1::REDUCTION_TOP_K) {
        EXPECT_EQ(row.tensors.at(1).indices, all.tensors.at(1).indices);
      }

      // Raw attention is the mean of these rows over layers (and over the named channels).
      v1::Explanation raw;
      *raw.mutable_target() = explanation.target();
      Set(how, raw.mutable_raw_attention());
      std::vector<double> mean(L_, 0);
      const auto rows = row.values().size() / L_;
      for (size_t e = 0; e < row.values().size(); ++e) {
        mean[e % L_] += row.values()[e] / static_cast<double>(rows);
      }
      ExpectNear(Explain(*traced_, raw).values(), mean, kRounding);
    }
  }
}

TEST_P(Properties, InnerMapsAndFactorsGiveAlpha) {
  for (int32_t direction = 0; direction < model_->config().directions(); ++direction) {
    SCOPED_TRACE(direction);
    const auto& config = model_->config();
    const int64_t target = causal() ? L_ / 2 : Targets()[0];
    const std::vector<int32_t> channels = {config.maps() - 1, 2};
    const Reference reference(*traced_);
    const auto explain = [&](v1::Part part, v1::Rows rows) {
      v1::Explanation explanation;
      explanation.mutable_target()->set_position(static_cast<int32_t>(target));
      auto* options = explanation.mutable_hidden_attention();
      options->set_part(part);
      options->set_rows(rows);
      if (!causal()) {
        options->set_direction(direction == 0 ? v1::HiddenAttention::DIRECTION_FORWARD
                                              : v1::HiddenAttention::DIRECTION_BACKWARD);
      }
      for (const int32_t channel : channels) options->add_channels(channel);
      Explained explained = Explain(*traced_, explanation);
      EXPECT_TRUE(explained.status.ok()) << explained.status;
      EXPECT_TRUE(explained.quality.within_tolerance()) << explained.quality.ShortDebugString();
      return explained.values();
    };
    const std::vector<float> state = explain(v1::PART_STATE, v1::ROWS_ALL);
    const std::vector<float> H = explain(v1::PART_H, v1::ROWS_ALL);
    const std::vector<float> Q = explain(v1::PART_Q, v1::ROWS_ALL);
    const std::vector<float> K = explain(v1::PART_K, v1::ROWS_ALL);
    const std::vector<float> state_row = explain(v1::PART_STATE, v1::ROWS_TARGET);
    const std::vector<float> H_row = explain(v1::PART_H, v1::ROWS_TARGET);
    const int64_t N = config.d_state, C = 2;
    for (int64_t l = 0; l < config.layers; ++l) {
      for (int64_t c = 0; c < C; ++c) {
        std::vector<double> sum(L_ * L_, 0), product(L_ * L_, 0);
        for (int64_t n = 0; n < N; ++n) {
          const int64_t map = (l * C + c) * N + n;
          for (int64_t i = 0; i < L_; ++i) {
            for (int64_t j = 0; j < L_; ++j) {
              const int64_t at = (map * L_ + i) * L_ + j;
              sum[i * L_ + j] += state[at];
              product[i * L_ + j] += static_cast<double>(Q[((l * L_ + i) * C + c) * N + n]) *
                                     H[at] * K[((l * L_ + j) * C + c) * N + n];
            }
          }
          ExpectNear(Row(state_row, L_, map), TargetRow(state, map, target), kRounding);
          ExpectNear(Row(H_row, L_, map), TargetRow(H, map, target), kRounding);
        }
        const std::vector<double> alpha =
            reference.Alpha(static_cast<int32_t>(l), channels[c], direction);
        ExpectNear(sum, alpha, kRounding);
        ExpectNear(product, alpha, kRounding);
      }
    }
  }
}

TEST_P(Properties, RolloutIsTheProductAndATargetsRowIsItsRow) {
  const int32_t start = model_->config().layers / 2;
  const Reference reference(*traced_);
  for (const How& how : AllReductions(model_->config())) {
    for (const auto normalization :
         {Rollout::NORMALIZATION_PAPER, Rollout::NORMALIZATION_ROW_SUM}) {
      SCOPED_TRACE(v1::Reduction_Name(how.reduction) + " " +
                   Rollout::Normalization_Name(normalization));
      std::vector<double> product(L_ * L_, 0);
      double smallest = 1e30, amplified = 1;
      for (int64_t i = 0; i < L_; ++i) product[i * L_ + i] = 1;
      for (int32_t layer = start; layer < model_->config().layers; ++layer) {
        std::vector<double> E = reference.Reduced(layer, how.reduction, how.channels, how.top_k);
        for (int64_t i = 0; i < L_; ++i) {
          E[i * L_ + i] += 1;
          const double sum = std::accumulate(E.begin() + i * L_, E.begin() + (i + 1) * L_, 0.0);
          if (normalization == Rollout::NORMALIZATION_PAPER) continue;
          smallest = std::min(smallest, std::fabs(sum));
          for (int64_t j = 0; j < L_; ++j) E[i * L_ + j] /= sum;
        }
        std::vector<double> next(L_ * L_, 0);
        for (int64_t i = 0; i < L_; ++i) {
          for (int64_t k = 0; k < (causal() ? i + 1 : L_); ++k) {
            for (int64_t j = 0; j < (causal() ? k + 1 : L_); ++j) {
              next[i * L_ + j] += E[i * L_ + k] * product[k * L_ + j];
            }
          }
        }
        product = next;
      }
      const bool row_sum = normalization == Rollout::NORMALIZATION_ROW_SUM;
      if (row_sum) amplified = std::max(1.0, 0.05 / smallest);  // a sum near 0 is known less well

      v1::Explanation explanation;
      Rollout* options = explanation.mutable_attention_rollout();
      Set(how, options);
      options->set_start_layer(start);
      options->set_normalization(normalization);
      options->set_rows(v1::ROWS_ALL);
      const Explained all = Explain(*traced_, explanation);
      ASSERT_TRUE(all.status.ok()) << all.status;
      ExpectNear(all.values(), product, kRounding * amplified);
      EXPECT_TRUE(all.quality.within_tolerance()) << all.quality.ShortDebugString();
      ASSERT_EQ(all.quality.has_smallest_row_sum(), row_sum);
      if (row_sum) {
        EXPECT_NEAR(all.quality.smallest_row_sum(), smallest, 1e-5);
      }
      EXPECT_EQ(all.quality.reconstruction().layers(0), start);

      options->set_rows(v1::ROWS_TARGET);
      for (const int64_t target : Targets()) {
        if (!pooled()) explanation.mutable_target()->set_position(static_cast<int32_t>(target));
        const Explained row = Explain(*traced_, explanation);
        ASSERT_TRUE(row.status.ok()) << row.status;
        ExpectNear(row.values(), TargetRow(all.values(), 0, target), 2 * kRounding * amplified);
        EXPECT_TRUE(row.quality.within_tolerance());
        ASSERT_EQ(row.quality.has_smallest_row_sum(), row_sum);
        if (row_sum && (target == L_ - 1 || !causal())) {
          EXPECT_NEAR(row.quality.smallest_row_sum(), smallest, 1e-5);
        }
      }
    }
  }
}

// A row sees no later token: as if the input ended with the target, and zeros behind.
TEST_P(Properties, LaterTokensChangeNothing) {
  if (!causal() || pooled()) return;  // every row reads all tokens
  const int64_t target = L_ / 2;
  std::vector<int32_t> tokens = testing::RandomTokens(*model_, L_, GetParam());
  tokens.resize(target + 1);
  Traced cut(*model_, tokens);
  for (const v1::Variant variant : {v1::VARIANT_PAPER, v1::VARIANT_CODE, v1::VARIANT_CODE_QUIRKS}) {
    for (const bool raw : {true, false}) {
      v1::Explanation explanation;
      if (raw) explanation.mutable_raw_attention()->set_variant(variant);
      if (!raw) explanation.mutable_attention_rollout()->set_variant(variant);
      explanation.mutable_target()->set_position(static_cast<int32_t>(target));
      const Explained whole = Explain(*traced_, explanation);
      const Explained before = Explain(cut, explanation);
      ASSERT_TRUE(whole.status.ok() && before.status.ok()) << whole.status;
      std::vector<float> expected = before.values();
      expected.resize(whole.values().size(), 0.0f);
      EXPECT_EQ(whole.values(), expected);  // the same bits
    }
  }
}

TEST_P(Properties, HalvesAreTheRoundedFloats) {
  for (const char* method : {"hidden_attention", "raw_attention", "attention_rollout"}) {
    v1::Explanation explanation;
    const auto* field = v1::Explanation::descriptor()->FindFieldByName(method);
    v1::Explanation::GetReflection()->MutableMessage(&explanation, field);
    const Explained floats = Explain(*traced_, explanation);
    const Explained halves = Explain(*traced_, explanation, v1::DATA_TYPE_FP16, 1000);
    std::string expected;
    for (const float value : floats.values()) {
      const uint16_t half = explain::FloatToHalf(value);
      expected.append(reinterpret_cast<const char*>(&half), 2);
    }
    EXPECT_EQ(halves.tensors.at(0).bytes, expected);
  }
}

TEST_P(Properties, ThreadsChangeNoBit) {
  ThreadPool three(3);
  for (const How& how : AllReductions(model_->config())) {
    v1::Explanation explanation;
    Set(how, explanation.mutable_attention_rollout());
    explanation.mutable_attention_rollout()->set_rows(v1::ROWS_ALL);
    const Explained two = Explain(*traced_, explanation);
    const auto* method = explain::FindMethod("attention_rollout");
    testing::CollectingSink sink;
    explain::TensorWriter writer("id", two.plan.tensors, 1024, &sink);
    explain::Subject subject = traced_->SubjectAt(L_ - 1);
    subject.pool = &three;
    const auto explaining = method->Start(explanation, subject);
    for (int32_t slice = 0; slice < two.plan.slices; ++slice) {
      ASSERT_TRUE(explaining->Step(writer).ok());
    }
    EXPECT_EQ(testing::Join(two.plan.tensors, sink.events, 1024).at(0).bytes,
              two.tensors.at(0).bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Properties, ::testing::Range(0, kSeeds));

// ---- quality ----

class Quality : public ::testing::Test {
 protected:
  Quality()
      : model_(testing::LoadRandomModel(RandomModel())),
        traced_(*model_, testing::RandomTokens(*model_, 40, 1)) {}

  std::vector<v1::Explanation> Explanations() const {
    std::vector<v1::Explanation> all;
    for (const auto rows : {v1::ROWS_ALL, v1::ROWS_TARGET}) {
      for (const auto how : {v1::REDUCTION_MEAN, v1::REDUCTION_ABS_MEAN, v1::REDUCTION_CHANNELS}) {
        auto* options = all.emplace_back().mutable_hidden_attention();
        options->set_reduction(how);
        options->set_rows(rows);
        if (how == v1::REDUCTION_CHANNELS) options->add_channels(7);
      }
      all.emplace_back().mutable_attention_rollout()->set_rows(rows);
      for (const auto part : {v1::PART_STATE, v1::PART_H}) {
        auto* options = all.emplace_back().mutable_hidden_attention();
        options->set_part(part);
        options->set_rows(rows);
        options->add_channels(7);
      }
    }
    all.emplace_back().mutable_raw_attention();
    all.emplace_back().mutable_raw_attention()->set_variant(v1::VARIANT_CODE);
    auto* options = all.emplace_back().mutable_hidden_attention();
    options->set_part(v1::PART_K);
    options->add_channels(7);
    return all;
  }

  std::unique_ptr<const model::MambaModel> model_;
  Traced traced_;
};

TEST_F(Quality, IsSmallOnWhatThePassRecorded) {
  for (const v1::Explanation& explanation : Explanations()) {
    SCOPED_TRACE(explanation.ShortDebugString());
    const v1::Quality quality = Explain(traced_, explanation).quality;
    EXPECT_TRUE(quality.within_tolerance());
    EXPECT_FLOAT_EQ(quality.tolerance(), 1e-4f);
    EXPECT_GT(quality.reconstruction().channels_compared(), 0);
    for (const float error : quality.reconstruction().relative_error_by_layer()) {
      EXPECT_LT(error, 1e-5);
    }
  }
}

TEST_F(Quality, IsLargeWhenTheRecordIsOfSomethingElse) {
  auto& layer = traced_.trace.layers[1];
  for (float& x : layer.x_checked) x *= 1.01f;
  for (const v1::Explanation& explanation : Explanations()) {
    SCOPED_TRACE(explanation.ShortDebugString());
    const v1::Quality quality = Explain(traced_, explanation).quality;
    EXPECT_FALSE(quality.within_tolerance());
    EXPECT_LT(quality.reconstruction().relative_error_by_layer(0), 1e-5);
    EXPECT_GT(quality.reconstruction().relative_error_by_layer(1), 1e-3);
  }
}

TEST_F(Quality, IsLargeWhenOneFactorIsWrong) {
  const auto& config = model_->config();
  const int64_t width = config.dt_rank + 2 * config.d_state;
  float& B = traced_.trace.layers[0].selective[38 * width + config.dt_rank];  // of token 38
  B += 0.5f;
  v1::Explanation explanation;
  explanation.mutable_hidden_attention();
  EXPECT_FALSE(Explain(traced_, explanation).quality.within_tolerance());
}

TEST_F(Quality, NotANumberIsNotWithinTolerance) {
  const int64_t checked = traced_.trace.checked_channels.size();
  for (int64_t k = 0; k < checked; ++k) {  // of one token in the middle
    traced_.trace.layers[0].y_checked[20 * checked + k] = std::nanf("");
  }
  v1::Explanation explanation;
  explanation.mutable_hidden_attention();
  EXPECT_FALSE(Explain(traced_, explanation).quality.within_tolerance());
}

// The simplified map does not rebuild what was computed, and says by how much.
TEST_F(Quality, OfTheReluPartIsTheErrorOfTheSimplification) {
  v1::Explanation explanation;
  explanation.mutable_hidden_attention()->set_part(v1::PART_RELU);
  const v1::Quality quality = Explain(traced_, explanation).quality;
  EXPECT_FALSE(quality.within_tolerance());
  EXPECT_GT(quality.reconstruction().relative_error_by_layer(0), 1e-3);
}

TEST_F(Quality, AResultThatIsNotFiniteIsAnErrorNamingTheLayer) {
  const auto& config = model_->config();
  traced_.trace.layers[1].selective[config.dt_rank + config.d_state] =
      std::nanf("");  // C of token 0
  for (const v1::Explanation& explanation : Explanations()) {
    if (explanation.hidden_attention().rows() == v1::ROWS_TARGET ||
        explanation.hidden_attention().part() != v1::PART_UNSPECIFIED ||
        !explanation.has_hidden_attention()) {
      continue;  // they do not read this number
    }
    const Explained explained = Explain(traced_, explanation);
    EXPECT_EQ(explained.status.code(), absl::StatusCode::kInternal);
    EXPECT_NE(std::string(explained.status.message()).find("layer 1"), std::string::npos)
        << explained.status;
  }
}

// ---- plans ----

// Work that does not fit a slice is cut by channels; what comes out is the same mean.
TEST(Plan, LongInputsAreCutIntoSlicesOfChannels) {
  RandomModel random;
  random.d_model = 16;
  random.d_inner = 640;
  random.d_state = 16;
  random.layers = 2;
  const auto model = testing::LoadRandomModel(random);
  Traced traced(*model, testing::RandomTokens(*model, 700, 3));
  for (const How& how : AllReductions(model->config())) {
    if (how.reduction == v1::REDUCTION_CHANNELS) continue;
    SCOPED_TRACE(v1::Reduction_Name(how.reduction));
    v1::Explanation explanation;
    Set(how, explanation.mutable_hidden_attention());
    explanation.mutable_hidden_attention()->add_layers()->set_end(1);
    const Explained all = Explain(traced, explanation, v1::DATA_TYPE_FP32, 1 << 18);
    EXPECT_GT(all.plan.slices, 1);
    EXPECT_TRUE(all.quality.within_tolerance());
    explanation.mutable_hidden_attention()->set_rows(v1::ROWS_TARGET);
    const Explained row = Explain(traced, explanation);
    ExpectNear(row.values(), Row(all.values(), 700, 699), kRounding);
  }
  v1::Explanation rollout;  // more exponentials than one slice has
  Traced longer(*model, testing::RandomTokens(*model, 2500, 3));
  rollout.mutable_attention_rollout()->set_normalization(Rollout::NORMALIZATION_ROW_SUM);
  const Explained row = Explain(longer, rollout);
  EXPECT_EQ(row.plan.slices, 2 * 2 * 2);
  EXPECT_NEAR(std::accumulate(row.values().begin(), row.values().end(), 0.0), 1, 1e-3);
}

TEST(Plan, NamesAxesAndTheirEntries) {
  const auto model = testing::LoadRandomModel(RandomModel());
  const auto plan = [&](const v1::Explanation& explanation) {
    return explain::FindMethod(explain::MethodName(explanation))
        ->MakePlan(explanation, model->config(), 9, v1::DATA_TYPE_FP16);
  };
  v1::Explanation explanation;
  auto* options = explanation.mutable_hidden_attention();
  options->set_part(v1::PART_STATE);
  options->add_layers()->set_begin(1);
  options->add_channels(40);
  options->add_channels(3);
  v1::TensorInfo info = plan(explanation).tensors.at(0);
  const auto axes = [&] {
    std::string text;
    for (const auto& axis : info.axes()) text += axis.name() + std::to_string(axis.size()) + " ";
    return text;
  };
  EXPECT_EQ(axes(), "layers1 channels2 states6 output_tokens9 input_tokens9 ");
  EXPECT_EQ(info.axes(0).labels(0), 1);
  EXPECT_EQ(info.axes(1).labels(0), 40);
  EXPECT_EQ(info.axes(2).labels_size(), 0);
  EXPECT_EQ(info.total_bytes(), 2 * 6 * 81 * 2);

  options->set_part(v1::PART_Q);
  info = plan(explanation).tensors.at(0);
  EXPECT_EQ(axes(), "layers1 tokens9 channels2 states6 ");

  explanation.Clear();
  explanation.mutable_raw_attention()->set_variant(v1::VARIANT_CODE);
  explanation.mutable_target()->set_position(-7);
  info = plan(explanation).tensors.at(0);
  EXPECT_EQ(axes(), "input_tokens8 ");
  EXPECT_EQ(info.axes(0).labels(1), 1);
  EXPECT_EQ(info.axes(0).labels(2), 3);  // position 2 is left out
}

}  // namespace
}  // namespace mambascope
