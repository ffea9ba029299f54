#pragma once

#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/explain/explained.h"
#include "tests/support/random_model.h"
#include "tests/support/safetensors_io.h"

// Subjects of all families: random ones, and those of the golden data.
namespace mambascope::testing {

// A random model of one of the families with an input and a target in it.
class RandomSubject {
 public:
  static constexpr int kSeeds = 60;

  explicit RandomSubject(int seed) : random_(seed) {
    RandomModel sizes;
    sizes.seed = 4000 + seed;
    sizes.layers = 1 + seed % 3;
    sizes.d_state = 1 + seed % 7;
    switch (seed % 6) {
      case 1:
        sizes.family = "mamba2";
        sizes.d_model = 12;
        sizes.head_dim = 4;
        break;
      case 2:
        sizes.family = "falcon_mamba";
        break;
      case 3:
        sizes.family = "vim";
        sizes.classes = 5;
        break;
      case 4:
        sizes.classes = 4;
        sizes.pooling = "mean";
        break;
      case 5:
        sizes.classes = 3;
        break;
      default:
        break;
    }
    model_ = LoadRandomModel(sizes);
    if (sizes.vision()) {
      std::vector<float> image(3 * sizes.image_size * sizes.image_size);
      for (float& value : image) value = static_cast<float>(Draw() % 2001) / 1000 - 1;
      traced_ = std::make_unique<Traced>(*model_, std::move(image));
      position_ = model_->config().vision.class_position();
    } else {
      constexpr int64_t kLengths[] = {1, 2, 9, 16, 40, 90};
      const int64_t tokens = kLengths[seed / 6 % 6];
      traced_ = std::make_unique<Traced>(*model_, RandomTokens(*model_, tokens, seed));
      const bool earlier = sizes.classes == 0 && seed % 4 == 2;
      position_ = static_cast<int32_t>(earlier ? tokens / 2 : tokens - 1);
    }
    if (seed % 5 == 0) traced_->contrast = 1;
    if (seed % 5 == 0) traced_->token = 2;
  }

  explain::Subject subject() { return traced_->SubjectAt(position_); }
  Traced& traced() { return *traced_; }
  bool vision() const { return model_->config().family == model::Family::kVim; }
  // Rows that are read.
  int64_t rows() const {
    return explain::ReadTokens(model_->config(), position_, traced_->trace.tokens);
  }
  // Everything that is read but the target's position.
  std::vector<int32_t> candidates() const {
    std::vector<int32_t> all;
    for (int32_t j = 0; j < rows(); ++j) {
      if (j != position_ || model_->config().mean_pooled()) all.push_back(j);
    }
    return all;
  }
  uint64_t Draw() { return random_(); }

 private:
  std::mt19937_64 random_;
  std::unique_ptr<const model::MambaModel> model_;
  std::unique_ptr<Traced> traced_;
  int32_t position_ = 0;
};

inline std::vector<std::string> GoldenModels() {
  return {"mamba1-tiny",           "mamba1-odd",  "mamba1-identity-conv",
          "falcon-mamba-tiny",     "mamba2-tiny", "mamba2-odd",
          "mamba2-relu",           "vim-tiny",    "mamba1-classifier-tiny",
          "mamba2-classifier-tiny"};
}

// A golden model with its inputs' forward passes; the target is the golden one.
class GoldenInputs {
 public:
  explicit GoldenInputs(const std::string& model)
      : folder_(MAMBASCOPE_SOURCE_DIR "/tests/golden/" + model + "/"), model_(LoadModel(folder_)) {
    const auto json = nlohmann::json::parse(ReadBytes(folder_ + "inputs.json"));
    for (const auto& [name, input] : json.at("inputs").items()) {
      if (input.contains("tokens")) {
        traced_[name] =
            std::make_unique<Traced>(*model_, input.at("tokens").get<std::vector<int32_t>>());
      } else {
        const std::vector<float> both =
            F32(ReadSafetensors(folder_ + "images.safetensors").begin()->second);
        const auto begin = both.begin() + (name == "image1" ? both.size() / 2 : 0);
        traced_[name] = std::make_unique<Traced>(
            *model_, std::vector<float>(begin, begin + static_cast<int64_t>(both.size() / 2)));
      }
      traced_[name]->token = input.at("target").get<int32_t>();
    }
  }

  StoredTensors Tensors(const std::string& file) const { return ReadSafetensors(folder_ + file); }
  // The input that a tensor's name begins with.
  Traced& At(const std::string& tensor) { return *traced_.at(tensor.substr(0, tensor.find('/'))); }
  const model::MambaModel& model() const { return *model_; }

 private:
  std::string folder_;
  std::unique_ptr<const model::MambaModel> model_;
  std::map<std::string, std::unique_ptr<Traced>> traced_;
};

// At most `bound` of the largest value, which is taken as at least 0.1 (golden/README.md).
inline void ExpectWithin(std::span<const float> values, const std::vector<double>& expected,
                         double bound) {
  ASSERT_EQ(values.size(), expected.size());
  double scale = 0.1, worst = 0;
  for (const double value : expected) scale = std::max(scale, std::fabs(value));
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(std::isfinite(values[i]));
    worst = std::max(worst, std::fabs(values[i] - expected[i]));
  }
  EXPECT_LE(worst, bound * scale);
}

}  // namespace mambascope::testing
