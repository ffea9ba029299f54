// Every tensor of the golden files that these methods can give, held against the float64 oracle.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "gtest/gtest.h"
#include "tests/explain/explained.h"
#include "tests/support/safetensors_io.h"

namespace mambascope {
namespace {

using testing::Explained;
using testing::F64;
using testing::I32;
using testing::Traced;
using Options = v1::HiddenAttention;

std::string Folder(const std::string& model) {
  return MAMBASCOPE_SOURCE_DIR "/tests/golden/" + model + "/";
}

// Bounds of golden/README.md, relative to s = max(0.1, largest |value|).
double Bound(char tolerance_class) { return tolerance_class == 'R' ? 1e-3 : 5e-5; }

v1::Explanation HiddenAttention(v1::Reduction reduction, v1::Part part = v1::PART_ALPHA) {
  v1::Explanation explanation;
  auto* options = explanation.mutable_hidden_attention();
  if (reduction != v1::REDUCTION_UNSPECIFIED) options->set_reduction(reduction);
  if (part != v1::PART_ALPHA) options->set_part(part);
  return explanation;
}

v1::Explanation OneLayer(v1::Explanation explanation, int layer) {
  auto* range = explanation.mutable_hidden_attention()->add_layers();
  range->set_begin(layer);
  range->set_end(layer + 1);
  return explanation;
}

// values[a, b, rest] as [b, a, rest].
std::vector<double> SwapAxes(const std::vector<double>& values, int64_t a, int64_t b) {
  std::vector<double> swapped(values.size());
  const auto rest = static_cast<int64_t>(values.size()) / (a * b);
  for (int64_t i = 0; i < a; ++i) {
    for (int64_t j = 0; j < b; ++j) {
      std::copy_n(values.begin() + (i * b + j) * rest, rest, swapped.begin() + (j * a + i) * rest);
    }
  }
  return swapped;
}

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  Golden() : model_(testing::LoadModel(Folder(GetParam()))) {
    const auto inputs =
        nlohmann::json::parse(testing::ReadBytes(Folder(GetParam()) + "inputs.json"));
    for (const auto& [name, input] : inputs.at("inputs").items()) {
      traced_[name] =
          input.contains("tokens")
              ? std::make_unique<Traced>(*model_, input.at("tokens").get<std::vector<int32_t>>())
              : std::make_unique<Traced>(*model_, Image(name));
    }
  }
  ~Golden() override {
    for (const auto& [tolerance_class, worst] : worst_) {
      RecordProperty(std::string("largest_error_") + tolerance_class, std::to_string(worst));
      std::printf("%s: largest error of class %c: %.2e s\n", GetParam().c_str(), tolerance_class,
                  worst);
    }
  }

  std::vector<float> Image(const std::string& name) const {
    const std::vector<float> images = testing::F32(
        testing::ReadSafetensors(Folder(GetParam()) + "images.safetensors").begin()->second);
    const auto half = static_cast<int64_t>(images.size()) / 2;
    const auto begin = images.begin() + (name == "image1" ? half : 0);
    return {begin, begin + half};
  }

  // The target's row of a map: of one that reads every row equally their mean.
  std::vector<double> TargetRow(const std::vector<double>& map, int64_t L) const {
    const model::ModelConfig& config = model_->config();
    const int64_t target =
        config.family == model::Family::kVim ? config.vision.class_position() : L - 1;
    if (!config.mean_pooled()) {
      return {map.begin() + target * L, map.begin() + (target + 1) * L};
    }
    std::vector<double> mean(L, 0);
    for (int64_t e = 0; e < L * L; ++e) mean[e % L] += map[e] / static_cast<double>(L);
    return mean;
  }

  void Compare(const std::vector<float>& values, const std::vector<double>& golden,
               char tolerance) {
    ASSERT_EQ(values.size(), golden.size());
    double scale = 0.1, worst = 0;
    for (const double value : golden) scale = std::max(scale, std::fabs(value));
    for (size_t i = 0; i < golden.size(); ++i) {
      worst = std::max(worst, std::fabs(values[i] - golden[i]) / scale);
      ASSERT_TRUE(std::isfinite(values[i]));
    }
    EXPECT_LE(worst, Bound(tolerance));
    worst_[tolerance] = std::max(worst_[tolerance], worst);
  }

  // Maps of all channels, 64 at a time, joined.
  std::vector<float> AllChannels(Traced& traced, int layer, v1::Part part,
                                 Options::Direction direction = Options::DIRECTION_UNSPECIFIED) {
    const int d_inner = model_->config().maps();
    std::vector<float> joined;
    for (int begin = 0; begin < d_inner; begin += 64) {
      v1::Explanation explanation =
          OneLayer(HiddenAttention(part == v1::PART_ALPHA || part == v1::PART_RELU
                                       ? v1::REDUCTION_CHANNELS
                                       : v1::REDUCTION_UNSPECIFIED,
                                   part),
                   layer);
      for (int c = begin; c < std::min(begin + 64, d_inner); ++c) {
        explanation.mutable_hidden_attention()->add_channels(c);
      }
      explanation.mutable_hidden_attention()->set_direction(direction);
      const Explained explained = Explain(traced, explanation);
      EXPECT_TRUE(explained.status.ok()) << explained.status;
      if (part == v1::PART_Q || part == v1::PART_K) {  // [L, channels, N] to [channels, L, N]
        const int64_t L = traced.trace.tokens, N = model_->config().d_state;
        const auto count = static_cast<int64_t>(explained.values().size()) / (L * N);
        for (int64_t c = 0; c < count; ++c) {
          for (int64_t i = 0; i < L; ++i) {
            const auto from = explained.values().begin() + (i * count + c) * N;
            joined.insert(joined.end(), from, from + N);
          }
        }
      } else {
        joined.insert(joined.end(), explained.values().begin(), explained.values().end());
      }
    }
    return joined;
  }

  // Unified maps of all channels [d_inner, L, L], and their constants [d_inner, L].
  std::pair<std::vector<float>, std::vector<float>> UnifiedMaps(Traced& traced, int layer) {
    const int d_inner = model_->config().d_inner;
    std::vector<float> maps, constants;
    for (int begin = 0; begin < d_inner; begin += 64) {
      v1::Explanation explanation = OneLayer(HiddenAttention(v1::REDUCTION_CHANNELS), layer);
      explanation.mutable_hidden_attention()->set_scope(Options::SCOPE_MIXER);
      for (int c = begin; c < std::min(begin + 64, d_inner); ++c) {
        explanation.mutable_hidden_attention()->add_channels(c);
      }
      const Explained explained = Explain(traced, explanation);
      EXPECT_TRUE(explained.status.ok()) << explained.status;
      EXPECT_TRUE(explained.quality.within_tolerance()) << explained.quality.ShortDebugString();
      maps.insert(maps.end(), explained.values().begin(), explained.values().end());
      const std::vector<float>& part = explained.tensors.at(1).values;
      constants.insert(constants.end(), part.begin(), part.end());
    }
    return {maps, constants};
  }

  std::unique_ptr<const model::MambaModel> model_;
  std::map<std::string, std::unique_ptr<Traced>> traced_;
  std::map<char, double> worst_;
};

TEST_P(Golden, HiddenAttention) {
  int compared = 0;
  const auto golden = testing::ReadSafetensors(Folder(GetParam()) + "attention.safetensors");
  for (const auto& [name, tensor] : golden) {
    SCOPED_TRACE(name);
    const std::string input = name.substr(0, name.find('/'));
    Traced& traced = *traced_.at(input);
    const std::string rest = name.substr(input.size() + 1);
    ASSERT_EQ(rest.substr(0, 5), "layer");
    const int layer = std::stoi(rest.substr(5));
    const std::string what = rest.substr(rest.find('/') + 1);
    const int64_t L = traced.trace.tokens, D = model_->config().maps(),
                  N = model_->config().d_state;
    ++compared;
    if (what == "mean" || what == "absmean") {
      const auto how = what == "mean" ? v1::REDUCTION_UNSPECIFIED : v1::REDUCTION_ABS_MEAN;
      Compare(Explain(traced, OneLayer(HiddenAttention(how), layer)).values(), F64(tensor), 'M');
    } else if (what == "topk3" || what == "topk3_indices") {
      v1::Explanation explanation = OneLayer(HiddenAttention(v1::REDUCTION_TOP_K), layer);
      explanation.mutable_hidden_attention()->set_top_k(3);
      const Explained explained = Explain(traced, explanation);
      if (what == "topk3") {
        Compare(explained.values(), F64(tensor), 'M');
      } else {
        EXPECT_EQ(explained.tensors.at(1).indices, I32(tensor));
      }
    } else if (what == "map1") {
      v1::Explanation explanation = OneLayer(HiddenAttention(v1::REDUCTION_CHANNELS), layer);
      explanation.mutable_hidden_attention()->add_channels(1);
      Compare(Explain(traced, explanation).values(), F64(tensor), 'M');
    } else if (what == "alpha") {
      Compare(AllChannels(traced, layer, v1::PART_ALPHA), F64(tensor), 'M');
    } else if (what == "alpha_fwd") {
      Compare(AllChannels(traced, layer, v1::PART_ALPHA, Options::DIRECTION_FORWARD), F64(tensor),
              'M');
    } else if (what == "alpha_bwd") {
      Compare(AllChannels(traced, layer, v1::PART_ALPHA, Options::DIRECTION_BACKWARD), F64(tensor),
              'M');
    } else if (what == "unified" || what == "unified_const") {
      const auto [maps, constants] = UnifiedMaps(traced, layer);
      if (what == "unified") {
        Compare(maps, F64(tensor), 'M');
      } else {  // [L, D] to [D, L]
        Compare(constants, SwapAxes(F64(tensor), L, model_->config().d_inner), 'M');
      }
    } else if (what == "unified_mean" || what == "unified_absmean") {
      v1::Explanation explanation = OneLayer(
          HiddenAttention(what == "unified_mean" ? v1::REDUCTION_MEAN : v1::REDUCTION_ABS_MEAN),
          layer);
      explanation.mutable_hidden_attention()->set_scope(Options::SCOPE_MIXER);
      const Explained all = Explain(traced, explanation);
      EXPECT_TRUE(all.quality.within_tolerance()) << all.quality.ShortDebugString();
      Compare(all.values(), F64(tensor), 'M');
      explanation.mutable_hidden_attention()->set_rows(v1::ROWS_TARGET);
      const Explained row = Explain(traced, explanation);
      EXPECT_TRUE(row.quality.within_tolerance()) << row.quality.ShortDebugString();
      Compare(row.values(), TargetRow(F64(tensor), L), 'M');
    } else if (what == "alpha_relu") {
      Compare(AllChannels(traced, layer, v1::PART_RELU), F64(tensor), 'M');
    } else if (what == "Q" || what == "K") {  // [L, D, N]
      Compare(AllChannels(traced, layer, what == "Q" ? v1::PART_Q : v1::PART_K),
              SwapAxes(F64(tensor), L, D), 'M');
    } else if (what == "H") {  // [L L, D N] to [D N, L L]
      Compare(AllChannels(traced, layer, v1::PART_H), SwapAxes(F64(tensor), L * L, D * N), 'M');
    } else if (what == "alpha_per_state_ch0") {
      v1::Explanation explanation =
          OneLayer(HiddenAttention(v1::REDUCTION_UNSPECIFIED, v1::PART_STATE), layer);
      explanation.mutable_hidden_attention()->add_channels(0);
      if (model_->config().directions() == 1) {
        Compare(Explain(traced, explanation).values(), F64(tensor), 'M');
      } else {  // the golden holds the sum of both
        explanation.mutable_hidden_attention()->set_direction(Options::DIRECTION_FORWARD);
        std::vector<float> sum = Explain(traced, explanation).values();
        explanation.mutable_hidden_attention()->set_direction(Options::DIRECTION_BACKWARD);
        const std::vector<float> backward = Explain(traced, explanation).values();
        for (size_t e = 0; e < sum.size(); ++e) sum[e] += backward[e];
        Compare(sum, F64(tensor), 'M');
      }
    } else {
      FAIL() << "unknown tensor";
    }
  }
  EXPECT_GT(compared, 30);
}

TEST_P(Golden, RawAttentionAndRollout) {
  int compared = 0;
  const auto golden = testing::ReadSafetensors(Folder(GetParam()) + "aggregation.safetensors");
  for (const auto& [name, tensor] : golden) {
    SCOPED_TRACE(name);
    const std::string input = name.substr(0, name.find('/'));
    Traced& traced = *traced_.at(input);
    const std::string rest = name.substr(input.size() + 1);
    if (rest.substr(0, 5) != "start" || rest.find("attribution") != std::string::npos) continue;
    ++compared;
    const int start = std::stoi(rest.substr(5));
    const std::string what = rest.substr(rest.find('/') + 1);
    const bool code = what.substr(0, 4) == "code";
    const v1::Variant variant = !code                          ? v1::VARIANT_UNSPECIFIED
                                : what.substr(0, 5) == "code/" ? v1::VARIANT_CODE
                                                               : v1::VARIANT_CODE_QUIRKS;
    v1::Explanation explanation;
    if (what.find("raw") != std::string::npos) {
      auto* options = explanation.mutable_raw_attention();
      options->set_start_layer(start);
      options->set_variant(variant);
      if (what == "raw_absmean") options->set_reduction(v1::REDUCTION_ABS_MEAN);
      Compare(Explain(traced, explanation).values(), F64(tensor), code ? 'G' : 'M');
      continue;
    }
    auto* options = explanation.mutable_attention_rollout();
    options->set_start_layer(start);
    options->set_variant(variant);
    if (what.find("absmean") != std::string::npos) options->set_reduction(v1::REDUCTION_ABS_MEAN);
    const bool row = code || what.find("_row_paper") != std::string::npos ||
                     what.find("_row_row_sum") != std::string::npos;
    const bool row_sum = what.find("row_sum") != std::string::npos;
    if (!code) {
      options->set_normalization(row_sum ? v1::AttentionRollout::NORMALIZATION_ROW_SUM
                                         : v1::AttentionRollout::NORMALIZATION_PAPER);
      if (!row) options->set_rows(v1::ROWS_ALL);
    }
    const char tolerance =
        code || (row_sum && what.find("absmean") == std::string::npos) ? 'R' : 'M';
    const Explained explained = Explain(traced, explanation);
    Compare(explained.values(), F64(tensor), tolerance);
    EXPECT_EQ(explained.quality.has_smallest_row_sum(), code || row_sum);
    EXPECT_TRUE(explained.quality.within_tolerance());
    if (!code && !row) {  // the same row without the others
      options->clear_rows();
      const Explained target = Explain(traced, explanation);
      const std::vector<double> all = F64(tensor);
      Compare(target.values(), TargetRow(all, traced.trace.tokens), tolerance);
    }
  }
  EXPECT_GE(compared, 2 * 2 * 10);
}

TEST_P(Golden, MapStatistics) {
  int compared = 0;
  const auto golden = testing::ReadSafetensors(Folder(GetParam()) + "evaluation.safetensors");
  for (const auto& [name, tensor] : golden) {
    SCOPED_TRACE(name);
    const std::string input = name.substr(0, name.find('/'));
    const std::string rest = name.substr(input.size() + 1);
    if (rest.substr(0, 11) != "statistics/") continue;
    ++compared;
    const bool absolute = rest.find("absmean") != std::string::npos;
    const Explained explained =
        Explain(*traced_.at(input),
                HiddenAttention(absolute ? v1::REDUCTION_ABS_MEAN : v1::REDUCTION_MEAN));
    const v1::MapStatistics& statistics = explained.finished.statistics();
    ASSERT_EQ(statistics.layers_size(), model_->config().layers);
    const std::string what = rest.substr(rest.rfind('/') + 1);
    const auto& values = what == "first_share"      ? statistics.first_share()
                         : what == "diagonal_share" ? statistics.diagonal_share()
                         : what == "entropy"        ? statistics.entropy()
                                                    : statistics.mean_distance();
    Compare({values.begin(), values.end()}, F64(tensor), 'M');
  }
  EXPECT_GE(compared, 2 * 4);
}

INSTANTIATE_TEST_SUITE_P(Models, Golden,
                         ::testing::Values("mamba1-tiny", "mamba1-odd", "mamba1-identity-conv",
                                           "falcon-mamba-tiny", "mamba2-tiny", "mamba2-odd",
                                           "mamba2-relu", "mamba2-classifier-tiny",
                                           "mamba1-classifier-tiny", "vim-tiny"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace mambascope
