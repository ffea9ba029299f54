#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/explain/explained.h"
#include "tests/model/golden.h"

// What the tests of LaTIM and of the lenses share.
namespace mambascope::testing {

// A golden model with its inputs traced, and the largest errors met.
class GoldenModel {
 public:
  explicit GoldenModel(const std::string& name)
      : name_(name),
        folder_(MAMBASCOPE_SOURCE_DIR "/tests/golden/" + name + "/"),
        model_(LoadModel(folder_)),
        targets_(nlohmann::json::parse(ReadBytes(folder_ + "inputs.json")).at("inputs")) {
    for (const model::Input& input : model::ReadInputs(folder_)) {
      traced_[input.name] = input.image.empty() ? std::make_unique<Traced>(*model_, input.tokens)
                                                : std::make_unique<Traced>(*model_, input.image);
    }
  }
  ~GoldenModel() {
    for (const auto& [tolerance_class, worst] : worst_) {
      std::printf("%s: largest error of class %c: %.2e s\n", name_.c_str(), tolerance_class, worst);
    }
  }

  StoredTensors Read(const std::string& file) const { return ReadSafetensors(folder_ + file); }
  // The input with the golden's target, and its contrast if asked for.
  Traced& At(const std::string& input, bool contrast = false) {
    Traced& traced = *traced_.at(input);
    traced.token = targets_.at(input).at("target");
    traced.contrast = contrast ? targets_.at(input).at("contrast").get<int32_t>() : -1;
    return traced;
  }
  const model::MambaModel& model() const { return *model_; }

  // Bounds of golden/README.md, relative to s = max(0.1, largest |value|); of P absolute.
  void Compare(const std::vector<float>& values, const std::vector<double>& golden,
               char tolerance) {
    ASSERT_EQ(values.size(), golden.size());
    double scale = 0.1, worst = 0;
    for (const double value : golden) scale = std::max(scale, std::fabs(value));
    if (tolerance == 'P') scale = 1;
    for (size_t i = 0; i < golden.size(); ++i) {
      ASSERT_TRUE(std::isfinite(values[i]));
      worst = std::max(worst, std::fabs(values[i] - golden[i]) / scale);
    }
    EXPECT_LE(worst, tolerance == 'R' ? 1e-3 : 5e-5);
    worst_[tolerance] = std::max(worst_[tolerance], worst);
  }

 private:
  const std::string name_, folder_;
  const std::unique_ptr<const model::MambaModel> model_;
  const nlohmann::json targets_;
  std::map<std::string, std::unique_ptr<Traced>> traced_;
  std::map<char, double> worst_;
};

// Sizes and kinds that change with the seed: every family, both poolings, every activation.
inline RandomModel RandomOfAnyKind(int seed) {
  RandomModel random;
  random.seed = 7000 + seed;
  random.d_model = 10 + seed % 5;
  random.d_inner = 8 + seed * 7 % 61;
  random.d_state = 1 + seed * 5 % 17;
  random.d_conv = 1 + seed % 5;
  random.layers = 1 + seed % 4;
  random.use_bias = seed % 3 == 0;
  random.use_conv_bias = seed % 4 != 1;
  random.tied_embeddings = seed % 2 == 0;
  random.conv_activation = seed % 5 == 0 ? "identity" : seed % 5 == 1 ? "relu" : "silu";
  const int kind = seed % 7;
  if (kind == 1) random.family = "falcon_mamba";
  if (kind == 2 || kind == 5 || kind == 6) {
    random.family = "mamba2";
    random.d_model = 12;
    random.heads = 6;
    random.groups = 1 + seed / 7 % 3;
    random.head_dim = 2 << seed % 2;
  }
  if (kind == 3) {
    random.family = "vim";
    random.d_inner = 2 * random.d_model;
    random.classes = 6;
    random.conv_activation = "silu";
    random.use_bias = false;
    random.use_conv_bias = true;
  }
  if (kind == 4 || kind == 5 || kind == 6) {
    random.classes = 4;
    random.pooling = kind == 6 ? "last" : "mean";
  }
  return random;
}

inline std::unique_ptr<Traced> TraceRandom(const model::MambaModel& model, int seed) {
  constexpr int kLengths[] = {1, 2, 5, 15, 16, 17, 33, 65, 70};
  const model::ModelConfig& config = model.config();
  if (config.family != model::Family::kVim) {
    return std::make_unique<Traced>(model, RandomTokens(model, kLengths[seed / 7 % 9], seed));
  }
  std::mt19937_64 random(seed);
  std::vector<float> image(int64_t{3} * config.vision.image_size * config.vision.image_size);
  for (float& value : image) value = static_cast<float>(random() % 4001) / 1000 - 2;
  return std::make_unique<Traced>(model, std::move(image));
}

inline const DeliveredTensor& Tensor(const Explained& explained, const std::string& name) {
  for (const DeliveredTensor& tensor : explained.tensors) {
    if (tensor.info.name() == name) return tensor;
  }
  throw std::runtime_error("no tensor " + name);
}

template <class A, class B>
void ExpectClose(const A& values, const B& expected, double relative) {
  ASSERT_EQ(values.size(), expected.size());
  double scale = 0.1, worst = 0;
  for (const double value : expected) scale = std::max(scale, std::fabs(value));
  for (size_t i = 0; i < values.size(); ++i) {
    worst = std::max(worst, std::fabs(static_cast<double>(values[i]) - expected[i]));
  }
  EXPECT_LE(worst, relative * scale);
}

}  // namespace mambascope::testing
