// Scope MIXER and the selective parameters on random models of every family: against out_proj's
// input and the scan's output as the pass computes them, and against what they are reductions of.
#include <cmath>
#include <string>

#include "gtest/gtest.h"
#include "server/model/layer_activations.h"
#include "tests/explain/explained.h"
#include "tests/explain/properties.h"

namespace mambascope {
namespace {

using testing::AllReductions;
using testing::ExpectNear;
using testing::Explained;
using testing::ExplainSubject;
using testing::How;
using testing::kRounding;
using testing::Row;
using testing::Set;
using testing::Traced;
using Options = v1::HiddenAttention;

class Mixer : public testing::Properties {
 protected:
  v1::Explanation Request(int32_t layer, v1::Rows rows, int64_t target) const {
    v1::Explanation explanation;
    if (!pooled()) explanation.mutable_target()->set_position(static_cast<int32_t>(target));
    Options* options = explanation.mutable_hidden_attention();
    options->set_scope(Options::SCOPE_MIXER);
    options->set_rows(rows);
    options->add_layers()->set_begin(layer);
    options->mutable_layers(0)->set_end(layer + 1);
    return explanation;
  }

  // What the method gives for every channel, as CHANNELS.
  struct All {
    std::vector<float> maps, constants;
  };
  All EveryChannel(v1::Explanation explanation) {
    All all;
    Options* options = explanation.mutable_hidden_attention();
    options->set_reduction(v1::REDUCTION_CHANNELS);
    const int32_t d_inner = model_->config().d_inner;
    for (int32_t begin = 0; begin < d_inner; begin += 64) {
      options->clear_channels();
      for (int32_t c = begin; c < std::min(begin + 64, d_inner); ++c) options->add_channels(c);
      const Explained explained = Explain(*traced_, explanation);
      EXPECT_TRUE(explained.status.ok()) << explained.status;
      EXPECT_TRUE(explained.quality.within_tolerance()) << explained.quality.ShortDebugString();
      all.maps.insert(all.maps.end(), explained.values().begin(), explained.values().end());
      const std::vector<float>& constants = explained.tensors.at(1).values;
      all.constants.insert(all.constants.end(), constants.begin(), constants.end());
    }
    return all;
  }

  model::LayerActivations Activations(int32_t layer) {
    model::LayerActivations activations;
    model::RunLayerOnce(traced_->pool, *model_, layer, traced_->trace.stream(layer), L_,
                        model::LayerParts::kAll, activations);
    return activations;
  }
};

TEST_P(Mixer, MapsAndConstantsRebuildWhatOutProjReads) {
  const auto& config = model_->config();
  const model::InProjLayout layout = model::InProjLayoutOf(config);
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    const All all = EveryChannel(Request(layer, v1::ROWS_ALL, 0));
    const model::LayerActivations activations = Activations(layer);
    std::vector<double> rebuilt, mixed;
    for (int64_t c = 0; c < config.d_inner; ++c) {
      for (int64_t i = 0; i < L_; ++i) {
        double sum = all.constants[c * L_ + i];
        for (int64_t j = 0; j < L_; ++j) {
          const float value = all.maps[(c * L_ + i) * L_ + j];
          ASSERT_TRUE(!causal() || j <= i || value == 0);
          sum += double{value} * activations.in[j * layout.stride + layout.x_in + c];
        }
        rebuilt.push_back(sum);
        mixed.push_back(MixedOf(activations)[i * config.d_inner + c]);
      }
    }
    ExpectNear(rebuilt, mixed, kRounding);
  }
}

TEST_P(Mixer, ReductionsAndRowsAreThoseOfTheChannelsMaps) {
  const auto& config = model_->config();
  const int32_t layer = config.layers - 1, D = config.d_inner;
  const All all = EveryChannel(Request(layer, v1::ROWS_ALL, 0));
  const auto reduced = [&](v1::Reduction how, std::span<const int32_t> channels,
                           const std::vector<float>& values) {
    const size_t size = values.size() / D;
    std::vector<double> mean(size, 0);
    for (const int32_t c : channels) {
      for (size_t e = 0; e < size; ++e) {
        const double value = values[c * size + e];
        mean[e] += (how == v1::REDUCTION_ABS_MEAN ? std::fabs(value) : value) /
                   static_cast<double>(channels.size());
      }
    }
    return mean;
  };
  for (const v1::Reduction how :
       {v1::REDUCTION_MEAN, v1::REDUCTION_ABS_MEAN, v1::REDUCTION_TOP_K}) {
    SCOPED_TRACE(v1::Reduction_Name(how));
    v1::Explanation explanation = Request(layer, v1::ROWS_ALL, 0);
    explanation.mutable_hidden_attention()->set_reduction(how);
    if (how == v1::REDUCTION_TOP_K) explanation.mutable_hidden_attention()->set_top_k(3);
    const Explained map = Explain(*traced_, explanation);
    ASSERT_TRUE(map.status.ok()) << map.status;
    EXPECT_TRUE(map.quality.within_tolerance()) << map.quality.ShortDebugString();
    EXPECT_EQ(map.quality.reconstruction().rows_compared(), L_);
    EXPECT_EQ(map.finished.statistics().layers_size(), 1);
    std::vector<int32_t> channels = explain::Indices(D);
    if (how == v1::REDUCTION_TOP_K) channels = map.tensors.at(2).indices;
    ExpectNear(map.values(), reduced(how, channels, all.maps), kRounding);
    ExpectNear(map.tensors.at(1).values, reduced(how, channels, all.constants), kRounding);

    for (const int64_t target : Targets()) {
      SCOPED_TRACE(target);
      v1::Explanation rows = Request(layer, v1::ROWS_TARGET, target);
      rows.mutable_hidden_attention()->set_reduction(how);
      rows.mutable_hidden_attention()->set_top_k(how == v1::REDUCTION_TOP_K ? 3 : 0);
      const Explained row = Explain(*traced_, rows);
      ASSERT_TRUE(row.status.ok()) << row.status;
      EXPECT_TRUE(row.quality.within_tolerance()) << row.quality.ShortDebugString();
      ExpectNear(row.values(), TargetRow(map.values(), 0, target), kRounding);
      ASSERT_EQ(row.tensors.at(1).values.size(), 1u);
      double constant = 0;
      for (int64_t i = 0; i < L_; ++i) {
        const double weight = pooled() ? 1.0 / static_cast<double>(L_) : i == target ? 1 : 0;
        constant += weight * map.tensors.at(1).values[i];
      }
      EXPECT_NEAR(row.tensors.at(1).values[0], constant, kRounding);
    }
  }
  for (const int64_t target : Targets()) {
    const All rows = EveryChannel(Request(layer, v1::ROWS_TARGET, target));
    for (int32_t c = 0; c < D; ++c) {
      ExpectNear(Row(rows.maps, L_, c), TargetRow(all.maps, c, target), kRounding);
    }
    EXPECT_EQ(rows.constants.size(), static_cast<size_t>(D));
  }
}

TEST_P(Mixer, TopChannelsAreThoseOfTheLargestMaps) {
  const All all = EveryChannel(Request(0, v1::ROWS_ALL, 0));
  std::vector<double> mass(model_->config().d_inner, 0);
  for (size_t e = 0; e < all.maps.size(); ++e) mass[e / (L_ * L_)] += std::fabs(all.maps[e]);
  v1::Explanation explanation = Request(0, v1::ROWS_TARGET, Targets()[0]);
  explanation.mutable_hidden_attention()->set_reduction(v1::REDUCTION_TOP_K);
  const std::vector<int32_t> best = Explain(*traced_, explanation).tensors.at(2).indices;
  ASSERT_EQ(best.size(), 4u);
  std::vector<double> sorted = mass;
  std::sort(sorted.rbegin(), sorted.rend());
  for (size_t k = 0; k < best.size(); ++k) {
    EXPECT_NEAR(mass[best[k]], sorted[k], 1e-5 * sorted[0]);
  }
}

TEST_P(Mixer, TheScansMapsAddUp) {
  if (causal()) return;  // one scan
  v1::Explanation explanation = Request(0, v1::ROWS_ALL, 0);
  const std::vector<float> both = Explain(*traced_, explanation).values();
  std::vector<double> sum(both.size(), 0);
  for (const auto direction : {Options::DIRECTION_FORWARD, Options::DIRECTION_BACKWARD}) {
    explanation.mutable_hidden_attention()->set_direction(direction);
    const Explained one = Explain(*traced_, explanation);
    EXPECT_TRUE(one.quality.within_tolerance()) << one.quality.ShortDebugString();
    for (int64_t i = 0; i < L_; ++i) {
      for (int64_t j = 0; j < L_; ++j) {
        const float value = one.values()[i * L_ + j];
        sum[i * L_ + j] += value;
        const bool outside = direction == Options::DIRECTION_FORWARD ? j > i : j < i;
        ASSERT_TRUE(!outside || value == 0);
      }
    }
  }
  ExpectNear(both, sum, kRounding);
}

TEST_P(Mixer, ThreadsAndLaterTokensChangeNoBit) {
  const auto bits = [&](const v1::Explanation& explanation, Traced& traced, ThreadPool& pool) {
    explain::Subject subject = traced.SubjectAt(
        explain::PositionOf(explanation, traced.model().config(), traced.trace.tokens));
    subject.pool = &pool;
    return ExplainSubject(subject, explanation).values();
  };
  ThreadPool three(3);
  for (const v1::Rows rows : {v1::ROWS_ALL, v1::ROWS_TARGET}) {
    const v1::Explanation explanation = Request(0, rows, Targets()[0]);
    EXPECT_EQ(bits(explanation, *traced_, traced_->pool), bits(explanation, *traced_, three));
  }
  if (!causal() || pooled()) return;
  std::vector<int32_t> tokens = testing::RandomTokens(*model_, L_, GetParam());
  tokens.resize(L_ / 2 + 1);
  Traced cut(*model_, tokens);
  const v1::Explanation explanation = Request(0, v1::ROWS_TARGET, L_ / 2);
  std::vector<float> expected = bits(explanation, cut, cut.pool);
  expected.resize(L_, 0.0f);
  EXPECT_EQ(bits(explanation, *traced_, traced_->pool), expected);
}

// A span of generated tokens is explained by the mean of their rows.
TEST_P(Mixer, ASpansRowIsTheMeanOfItsRows) {
  if (model_->config().task != model::Task::kNextToken || L_ < 3) return;
  const std::vector<int64_t> span = {L_ - 3, L_ - 2, L_ - 1};
  for (const How& how : AllReductions(model_->config())) {
    for (const Options::Scope scope : {Options::SCOPE_SSM, Options::SCOPE_MIXER}) {
      SCOPED_TRACE(v1::Reduction_Name(how.reduction) + " " + Options::Scope_Name(scope));
      v1::Explanation explanation;
      Options* options = explanation.mutable_hidden_attention();
      Set(how, options);
      options->set_scope(scope);
      const Explained maps = Explain(*traced_, explanation);
      options->set_rows(v1::ROWS_TARGET);
      explanation.mutable_target()->set_generated(0);
      explanation.mutable_target()->set_generated_end(3);
      explain::Subject subject = traced_->SubjectAt(L_ - 1);
      subject.outputs.clear();
      for (const int64_t position : span) {
        subject.outputs.push_back({static_cast<int32_t>(position), 0, -1});
      }
      const Explained row = ExplainSubject(subject, explanation);
      ASSERT_TRUE(row.status.ok()) << row.status;
      EXPECT_TRUE(row.quality.within_tolerance()) << row.quality.ShortDebugString();
      std::vector<double> mean(row.values().size(), 0);
      for (size_t e = 0; e < mean.size(); ++e) {
        for (const int64_t position : span) {
          mean[e] += maps.values()[(e / L_ * L_ + position) * L_ + e % L_] / 3.0;
        }
      }
      ExpectNear(row.values(), mean, kRounding);
    }
  }
}

TEST_P(Mixer, ParametersAreWhatTheScanReadAndLeft) {
  const auto& config = model_->config();
  const bool headed = config.family == model::Family::kMamba2;
  const int64_t N = config.d_state, G = config.groups,
                checked = static_cast<int64_t>(traced_->trace.checked_channels.size());
  for (int32_t direction = 0; direction < config.directions(); ++direction) {
    v1::Explanation explanation;
    auto* options = explanation.mutable_parameters();
    for (const auto kind :
         {v1::Parameters::KIND_STATE, v1::Parameters::KIND_DELTA, v1::Parameters::KIND_B,
          v1::Parameters::KIND_C, v1::Parameters::KIND_DECAY, v1::Parameters::KIND_GATE}) {
      options->add_kinds(kind);
    }
    if (direction == 1) options->set_direction(Options::DIRECTION_BACKWARD);
    if (GetParam() % 2 == 0) {  // every other token, the last first; else all, as they come
      for (int64_t i = L_ - 1; i >= 0; i -= 2) options->add_positions(static_cast<int32_t>(i));
    } else {
      for (int64_t i = 0; i < L_; ++i) options->add_positions(static_cast<int32_t>(i));
    }
    const std::vector<int32_t> positions(options->positions().begin(), options->positions().end());
    const Explained explained = Explain(*traced_, explanation);
    ASSERT_TRUE(explained.status.ok()) << explained.status;
    EXPECT_TRUE(explained.quality.within_tolerance()) << explained.quality.ShortDebugString();
    const auto tensor = [&](int at) -> const std::vector<float>& {
      return explained.tensors.at(at).values;
    };
    const auto P = static_cast<int64_t>(positions.size());
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      model::MambaModel::ScanBuffers buffers;
      const auto scan =
          model_->ScanParametersOf(traced_->pool, traced_->trace, layer, direction, L_, buffers);
      const model::LayerActivations activations = Activations(layer);
      const model::InProjLayout layout = model::InProjLayoutOf(config);
      const auto& branch = model_->weights().layer(layer).branches[direction];
      const auto& trace = traced_->trace.layer(layer, direction);
      std::vector<double> y, recorded;
      for (int64_t p = 0; p < P; ++p) {
        const int64_t token = positions[p], i = direction == 0 ? token : L_ - 1 - token;
        const int64_t at = layer * P + p;
        for (int64_t d = 0; d < config.maps(); ++d) {
          const float delta = scan.delta[i * config.maps() + d];
          ASSERT_EQ(tensor(1)[at * config.maps() + d], delta);
          for (int64_t n = 0; n < (headed ? 1 : N); ++n) {
            ASSERT_FLOAT_EQ(tensor(4)[(at * config.maps() + d) * (headed ? 1 : N) + n],
                            std::exp(delta * scan.A[n * config.maps() + d]));
          }
        }
        for (int64_t n = 0; n < G * N; ++n) {
          ASSERT_EQ(tensor(2)[at * G * N + n], scan.B[i * scan.bc_stride + n]);
          ASSERT_EQ(tensor(3)[at * G * N + n], scan.C[i * scan.bc_stride + n]);
        }
        for (int64_t d = 0; d < config.d_inner; ++d) {
          const float z = activations.in[token * layout.stride + layout.z + d];
          ASSERT_FLOAT_EQ(tensor(5)[at * config.d_inner + d], z / (1 + std::exp(-z)));
        }
        for (int64_t k = 0; k < checked; ++k) {  // y = C state + D x
          const int64_t d = traced_->trace.checked_channels[k], map = d / config.channels_per_map();
          const int64_t group = map / (config.maps() / G);
          double sum = double{branch.D[map]} * trace.x_checked[i * checked + k];
          for (int64_t n = 0; n < N; ++n) {
            sum += double{tensor(3)[(at * G + group) * N + n]} *
                   tensor(0)[(at * config.d_inner + d) * N + n];
          }
          y.push_back(sum);
          recorded.push_back(trace.y_checked[i * checked + k]);
        }
      }
      ExpectNear(y, recorded, kRounding);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Mixer, ::testing::Range(0, testing::kSeeds));

}  // namespace
}  // namespace mambascope
