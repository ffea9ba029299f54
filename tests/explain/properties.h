#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/explain/explained.h"

namespace mambascope::testing {

// What the tests over random models share: the models, and definitions spelled out in double.

constexpr int kSeeds = 54;

// Sizes that change with the seed, around the kernels' blocks of 16, 32 and 128 tokens now and
// then. Of nine seeds three are Mamba-2 (groups of one, two or three heads), two Vim and one
// Falcon-Mamba; some of those with text pool the mean.
inline RandomModel Random(int seed) {
  RandomModel random;
  random.seed = 1000 + seed;
  random.d_inner = 8 + seed * 7 % 61;
  random.d_state = 1 + seed * 5 % 17;
  random.layers = 1 + seed % 4;
  random.use_bias = seed % 3 == 0;
  random.use_conv_bias = seed % 5 != 2;
  random.d_conv = 1 + seed * 3 % 5;
  random.conv_activation = seed % 5 == 0 ? "identity" : seed % 5 == 1 ? "relu" : "silu";
  if (seed % 3 == 1) {
    random.family = "mamba2";
    random.heads = 6;
    random.groups = 1 + seed / 3 % 3;
    random.head_dim = 4;
    random.d_model = 12;
  } else if (seed % 9 == 5 || seed % 9 == 6) {
    random.family = "vim";
    random.d_model = 4 + seed % 4;
    random.d_inner = random.d_model * (2 + seed % 7);
    random.classes = 5;
    random.use_bias = false;
    random.use_conv_bias = true;
    constexpr int kSizes[] = {4, 12, 16, 20, 32};
    random.image_size = kSizes[seed % 5];
  } else if (seed % 9 == 3) {
    random.family = "falcon_mamba";
  }
  if (!random.vision() && seed % 4 == 2) {
    random.classes = 4;
    random.pooling = "mean";
  }
  return random;
}
inline int64_t Length(int seed) {
  constexpr int kLengths[] = {1, 2, 5, 15, 16, 17, 33, 70, 129, 31};
  return kLengths[seed % 10];
}

inline std::vector<float> RandomImage(const model::MambaModel& model, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> image(3 * model.config().vision.image_size * model.config().vision.image_size);
  for (float& value : image) value = static_cast<float>(random() % 1000) * 0.004f - 2;
  return image;
}

// A reduced map in double by its definition.
class Reference {
 public:
  explicit Reference(Traced& traced) : traced_(traced), L_(traced.trace.tokens) {}

  // alpha[d] of one layer, [L, L]: of both scans, or of one.
  std::vector<double> Alpha(int32_t layer, int32_t channel, int32_t only = -1) const {
    std::vector<double> alpha(L_ * L_, 0);
    for (int32_t direction = 0; direction < traced_.model().config().directions(); ++direction) {
      if (only >= 0 && direction != only) continue;
      std::vector<double> map = OfScan(layer, direction, channel);
      if (direction == 1) std::reverse(map.begin(), map.end());
      for (size_t e = 0; e < map.size(); ++e) alpha[e] += map[e];
    }
    return alpha;
  }

  // The same of one scan, tokens in its own order.
  std::vector<double> OfScan(int32_t layer, int32_t direction, int32_t channel) const {
    model::MambaModel::ScanBuffers buffers;
    const model::ModelConfig& config = traced_.model().config();
    const auto scan = traced_.model().ScanParametersOf(traced_.pool, traced_.trace, layer,
                                                       direction, L_, buffers);
    const int64_t group = channel / (config.maps() / config.groups) * config.d_state;
    std::vector<double> alpha(L_ * L_, 0);
    for (int64_t n = 0; n < scan.d_state; ++n) {
      for (int64_t j = 0; j < L_; ++j) {
        double h = static_cast<double>(scan.delta[j * scan.d_inner + channel]) *
                   scan.B[j * scan.bc_stride + group + n];
        for (int64_t i = j; i < L_; ++i) {
          if (i > j) {
            h *= std::exp(static_cast<double>(scan.delta[i * scan.d_inner + channel]) *
                          scan.A[n * scan.d_inner + channel]);
          }
          alpha[i * L_ + j] += h * scan.C[i * scan.bc_stride + group + n];
        }
      }
    }
    return alpha;
  }

  std::vector<double> Reduced(int32_t layer, v1::Reduction how, std::vector<int32_t> channels,
                              int32_t top_k) const {
    std::vector<std::vector<double>> maps;
    std::vector<double> mass;
    for (int32_t d = 0; d < traced_.model().config().maps(); ++d) {
      maps.push_back(Alpha(layer, d));
      mass.push_back(0);
      for (const double value : maps.back()) mass.back() += std::fabs(value);
    }
    if (how != v1::REDUCTION_CHANNELS) {
      channels.resize(maps.size());
      std::iota(channels.begin(), channels.end(), 0);
    }
    if (how == v1::REDUCTION_TOP_K) {
      std::stable_sort(channels.begin(), channels.end(),
                       [&](int32_t a, int32_t b) { return mass[a] > mass[b]; });
      channels.resize(top_k);
    }
    std::vector<double> mean(L_ * L_, 0);
    for (const int32_t d : channels) {
      for (size_t e = 0; e < mean.size(); ++e) {
        const double value = how == v1::REDUCTION_ABS_MEAN ? std::fabs(maps[d][e]) : maps[d][e];
        mean[e] += value / static_cast<double>(channels.size());
      }
    }
    return mean;
  }

 private:
  Traced& traced_;
  const int64_t L_;
};

template <class A, class B>
inline void ExpectNear(const A& values, const B& expected, double relative) {
  ASSERT_EQ(values.size(), expected.size());
  double scale = 0.1, worst = 0;
  for (const double value : expected) scale = std::max(scale, std::fabs(value));
  for (size_t i = 0; i < values.size(); ++i) {
    worst = std::max(worst, std::fabs(static_cast<double>(values[i]) - expected[i]));
  }
  EXPECT_LE(worst, relative * scale);
}

// fp32 sums in another order than double ones; the golden files' class M.
constexpr double kRounding = 5e-5;

inline std::vector<float> Row(const std::vector<float>& map, int64_t L, int64_t row) {
  return {map.begin() + row * L, map.begin() + (row + 1) * L};
}

struct How {
  v1::Reduction reduction = v1::REDUCTION_MEAN;
  std::vector<int32_t> channels;
  int32_t top_k = 0;
};
inline std::vector<How> AllReductions(const model::ModelConfig& config) {
  return {{v1::REDUCTION_MEAN, {}, 0},
          {v1::REDUCTION_ABS_MEAN, {}, 0},
          {v1::REDUCTION_TOP_K, {}, 3},
          {v1::REDUCTION_CHANNELS, {config.maps() - 1, 0, 4}, 0}};
}
template <class Options>
void Set(const How& how, Options* options) {
  options->set_reduction(how.reduction);
  options->set_top_k(how.top_k);
  for (const int32_t channel : how.channels) options->add_channels(channel);
}

// A random model and an input of its kind.
class Properties : public ::testing::TestWithParam<int> {
 protected:
  Properties()
      : model_(LoadRandomModel(Random(GetParam()))),
        traced_(model_->config().family == model::Family::kVim
                    ? std::make_unique<Traced>(*model_, RandomImage(*model_, GetParam()))
                    : std::make_unique<Traced>(
                          *model_, RandomTokens(*model_, Length(GetParam()), GetParam()))),
        L_(traced_->trace.tokens) {}

  bool causal() const { return model_->config().directions() == 1; }
  bool pooled() const { return model_->config().mean_pooled(); }
  // Positions that a target may have.
  std::vector<int64_t> Targets() const {
    if (!causal()) return {model_->config().vision.class_position()};
    if (pooled()) return {L_ - 1};
    return {0, L_ / 2, L_ - 1};
  }
  // Of a list of maps [maps, L, L] the target's row of one.
  std::vector<float> TargetRow(const std::vector<float>& maps, int64_t map, int64_t target) const {
    if (!pooled()) return Row(maps, L_, map * L_ + target);
    std::vector<double> mean(L_, 0);
    for (int64_t e = 0; e < L_ * L_; ++e) {
      mean[e % L_] += maps[map * L_ * L_ + e] / static_cast<double>(L_);
    }
    return {mean.begin(), mean.end()};
  }

  const std::unique_ptr<const model::MambaModel> model_;
  const std::unique_ptr<Traced> traced_;
  const int64_t L_;
};

}  // namespace mambascope::testing
