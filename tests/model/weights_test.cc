#include "server/model/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/random_model.h"
#include "tests/support/safetensors_io.h"

namespace mambascope::model {
namespace {

using ::testing::HasSubstr;
using testing::RandomModel;
using testing::StoredTensor;
using testing::StoredTensors;

constexpr char kLayer1[] = "backbone.layers.1.mixer.";

class WeightsFolder : public ::testing::Test {
 protected:
  WeightsFolder()
      : folder_(::testing::TempDir() + "/weights_" +
                ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::create_directories(folder_);
  }
  ~WeightsFolder() override { std::filesystem::remove_all(folder_); }

  void Write(const StoredTensors& tensors, const RandomModel& model = {}, int shift = 0) const {
    testing::WriteBytes(folder_ + "/config.json", testing::RandomConfig(model).dump());
    testing::WriteSafetensors(folder_ + "/model.safetensors", tensors, shift);
  }
  absl::StatusOr<std::unique_ptr<const Weights>> Load(const RandomModel& model = {}) const {
    const absl::StatusOr<ModelConfig> config = ParseConfig(testing::RandomConfig(model).dump());
    EXPECT_TRUE(config.ok()) << config.status();
    return Weights::Load(folder_, *config);
  }
  // What is wrong with these tensors, without the file's name.
  std::string FaultOf(const StoredTensors& tensors, const RandomModel& model = {}) const {
    Write(tensors, model);
    const auto weights = Load(model);
    if (weights.ok()) return "accepted";
    EXPECT_EQ(weights.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message(weights.status().message()),
        prefix = folder_ + "/model.safetensors: ";
    EXPECT_EQ(message.find(prefix), 0u) << message;
    return message.substr(prefix.size());
  }

  const std::string folder_;
};

std::vector<float> First(const float* values, size_t count) { return {values, values + count}; }

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

StoredTensor AsBF16(const StoredTensor& tensor) {
  std::vector<uint16_t> halves;
  for (const float value : testing::F32(tensor)) {
    const uint32_t bits = Bits(value);
    halves.push_back(
        static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));  // ties to even
  }
  return testing::Store("BF16", tensor.shape, halves);
}

StoredTensor Widened(const StoredTensor& bf16) {
  std::vector<float> values;
  for (const uint16_t half : testing::ValuesAs<uint16_t>(bf16, "BF16")) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(half) << 16));
  }
  return testing::StoreF32(bf16.shape, values);
}

TEST_F(WeightsFolder, HoldsWhatTheFileHolds) {
  RandomModel model;
  model.use_bias = true;
  model.tied_embeddings = false;
  const StoredTensors tensors = testing::RandomWeights(model);
  Write(tensors, model);
  const auto loaded = Load(model);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Weights& weights = **loaded;
  const LayerWeights& layer = weights.layer(1);
  const auto expect = [&](const float* values, const std::string& name) {
    SCOPED_TRACE(name);
    const std::vector<float> expected = testing::F32(tensors.at(name));
    EXPECT_EQ(First(values, expected.size()), expected);
  };
  const std::string mixer = kLayer1;
  const auto expect_matrix = [&](const kernels::WeightMatrix& matrix, const std::string& name) {
    ASSERT_EQ(matrix.type, kernels::ElementType::kF32);
    expect(static_cast<const float*>(matrix.data), name);
  };
  const BranchWeights& branch = layer.branches[0];
  expect_matrix(weights.views().embeddings, "backbone.embeddings.weight");
  expect(weights.views().norm_f, "backbone.norm_f.weight");
  expect_matrix(weights.views().head, "lm_head.weight");
  expect(layer.norm, "backbone.layers.1.norm.weight");
  expect_matrix(layer.in_proj, mixer + "in_proj.weight");
  expect(layer.in_proj_bias, mixer + "in_proj.bias");
  expect(branch.conv1d, mixer + "conv1d.weight");
  expect(branch.conv1d_bias, mixer + "conv1d.bias");
  expect_matrix(branch.x_proj, mixer + "x_proj.weight");
  expect_matrix(branch.dt_proj, mixer + "dt_proj.weight");
  expect(branch.dt_bias, mixer + "dt_proj.bias");
  expect(branch.D, mixer + "D");
  expect_matrix(layer.out_proj, mixer + "out_proj.weight");
  expect(layer.out_proj_bias, mixer + "out_proj.bias");

  const std::vector<float> A_log = testing::F32(tensors.at(mixer + "A_log"));
  for (int64_t d = 0; d < model.d_inner; ++d) {
    for (int64_t n = 0; n < model.d_state; ++n) {
      const float expected = -std::exp(A_log[d * model.d_state + n]);
      EXPECT_NEAR(branch.A[n * model.d_inner + d] / expected, 1,
                  1e-6);  // two exponentials' rounding
    }
  }
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += static_cast<int64_t>(tensor.bytes.size());
  EXPECT_EQ(weights.stored_dtype(), "F32");
  EXPECT_EQ(weights.stored_bytes(), bytes);
  EXPECT_EQ(weights.parameters(), bytes / 4);
}

TEST_F(WeightsFolder, WhatTheConfigHasNotIsNull) {
  RandomModel model;
  model.use_conv_bias = false;
  Write(testing::RandomWeights(model), model);
  const auto weights = Load(model);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ((*weights)->layer(0).in_proj_bias, nullptr);
  EXPECT_EQ((*weights)->layer(0).branches[0].conv1d_bias, nullptr);
  EXPECT_EQ((*weights)->layer(0).out_proj_bias, nullptr);
}

TEST_F(WeightsFolder, TheDigestIsThatOfConfigAndWeights) {
  const std::string folder = MAMBASCOPE_SOURCE_DIR "/tests/golden/mamba1-tiny";
  const absl::StatusOr<ModelConfig> config =
      ParseConfig(testing::ReadBytes(folder + "/config.json"));
  const auto weights = Weights::Load(folder, *config);
  ASSERT_TRUE(weights.ok()) << weights.status();
  // cat config.json model.safetensors | sha256sum
  EXPECT_EQ((*weights)->digest(),
            "185d4d271dd6c46ab33b72b18f0d0ceb34ea465fba93ec42c555356b567cb534");
}

TEST_F(WeightsFolder, ATiedHeadIsTheEmbeddingMatrixWhateverTheFileHolds) {
  RandomModel model;
  StoredTensors tensors = testing::RandomWeights(model);
  Write(tensors, model);
  const auto without = Load(model);
  EXPECT_EQ((*without)->views().head.data, (*without)->views().embeddings.data);

  tensors["lm_head.weight"] = tensors.at("backbone.embeddings.weight");
  Write(tensors, model);
  const auto with = Load(model);
  ASSERT_TRUE(with.ok()) << with.status();
  EXPECT_EQ((*with)->views().head.data, (*with)->views().embeddings.data);
  EXPECT_EQ((*with)->parameters(), (*without)->parameters());

  model.tied_embeddings = false;  // and the file has no head: tied all the same
  tensors.erase("lm_head.weight");
  Write(tensors, model);
  const auto dropped = Load(model);
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ((*dropped)->views().head.data, (*dropped)->views().embeddings.data);
}

TEST_F(WeightsFolder, BF16MatricesStayAndTheRestIsWidenedExactly) {
  StoredTensors halves = testing::RandomWeights({}), widened;
  for (auto& [name, tensor] : halves) {
    tensor = AsBF16(tensor);
    widened[name] = Widened(tensor);
  }
  Write(halves);
  const auto stored = Load();
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ((*stored)->stored_dtype(), "BF16");
  EXPECT_EQ((*stored)->stored_bytes(), 2 * (*stored)->parameters());
  const kernels::WeightMatrix& in_proj = (*stored)->layer(1).in_proj;
  ASSERT_EQ(in_proj.type, kernels::ElementType::kBF16);
  const auto& bytes = halves.at(std::string(kLayer1) + "in_proj.weight").bytes;
  EXPECT_EQ(std::memcmp(in_proj.data, bytes.data(), bytes.size()), 0);

  Write(widened);
  const auto reference = Load();
  ASSERT_TRUE(reference.ok()) << reference.status();
  const RandomModel sizes;
  const float *a = (*stored)->layer(1).branches[0].A, *b = (*reference)->layer(1).branches[0].A;
  for (int64_t i = 0; i < sizes.d_state * sizes.d_inner; ++i) ASSERT_EQ(Bits(a[i]), Bits(b[i]));
}

TEST_F(WeightsFolder, F16AndMixedFilesLoad) {
  StoredTensors tensors = testing::RandomWeights({});
  tensors["backbone.norm_f.weight"] =
      testing::Store<uint16_t>("F16", {24}, std::vector<uint16_t>(24, 0x3e00));  // 1.5
  Write(tensors);
  const auto weights = Load();
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ((*weights)->stored_dtype(), "mixed");
  EXPECT_EQ(First((*weights)->views().norm_f, 24), std::vector<float>(24, 1.5f));
}

TEST_F(WeightsFolder, DataOffTheBoundaryOfFloatsIsCopied) {
  const StoredTensors tensors = testing::RandomWeights({});
  for (const int shift : {1, 2, 3}) {
    SCOPED_TRACE(shift);
    Write(tensors, {}, shift);
    const auto weights = Load();
    ASSERT_TRUE(weights.ok()) << weights.status();
    const std::vector<float> expected = testing::F32(tensors.at("backbone.embeddings.weight"));
    const auto* values = static_cast<const float*>((*weights)->views().embeddings.data);
    EXPECT_EQ(First(values, expected.size()), expected);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(values) % alignof(float), 0u);
  }
}

TEST_F(WeightsFolder, EveryFaultNamesItsTensor) {
  const StoredTensors sound = testing::RandomWeights({});
  const std::string in_proj = std::string(kLayer1) + "in_proj.weight",
                    D = std::string(kLayer1) + "D", A_log = std::string(kLayer1) + "A_log";

  StoredTensors tensors = sound;
  tensors.erase(in_proj);
  EXPECT_EQ(FaultOf(tensors), in_proj + ": is missing");

  tensors = sound;
  tensors["backbone.layers.2.norm.weight"] = sound.at("backbone.layers.1.norm.weight");
  EXPECT_EQ(FaultOf(tensors), "backbone.layers.2.norm.weight: is not a tensor of this model");

  tensors = sound;
  tensors[in_proj].shape = {24, 96};
  EXPECT_EQ(FaultOf(tensors), in_proj + ": has shape [24, 96], the config asks for [96, 24]");

  tensors = sound;
  tensors[D] = testing::Store<double>("F64", {48}, std::vector<double>(48, 1));
  EXPECT_EQ(FaultOf(tensors), D + ": has dtype F64; supported: F32, BF16, F16");

  for (const float value : {NAN, INFINITY, -INFINITY}) {
    for (const size_t at : {size_t{0}, size_t{1000}, size_t{96 * 24 - 1}}) {
      tensors = sound;
      std::memcpy(tensors[in_proj].bytes.data() + 4 * at, &value, 4);
      EXPECT_EQ(FaultOf(tensors), in_proj + ": has a value that is not finite");
    }
  }
  tensors = sound;
  tensors[D] = testing::Store<uint16_t>("BF16", {48}, std::vector<uint16_t>(48, 0x7f80));
  EXPECT_EQ(FaultOf(tensors), D + ": has a value that is not finite");

  tensors = sound;
  const float large = 100;  // e^100 is no float, and delta = 0 times infinity is no number
  std::memcpy(tensors[A_log].bytes.data(), &large, 4);
  EXPECT_EQ(FaultOf(tensors), A_log + ": has a value whose exponential is not finite");

  RandomModel biased;
  biased.use_bias = true;
  EXPECT_THAT(FaultOf(sound, biased),
              HasSubstr("backbone.layers.0.mixer.out_proj.bias: is missing"));
  EXPECT_THAT(FaultOf(testing::RandomWeights(biased)),
              HasSubstr("backbone.layers.0.mixer.in_proj.bias: is not a tensor of this model"));
}

TEST_F(WeightsFolder, AllFaultsComeAtOnceButNotWithoutEnd) {
  StoredTensors tensors = testing::RandomWeights({});
  tensors.erase("backbone.norm_f.weight");
  tensors[std::string(kLayer1) + "D"].shape = {1, 48};
  tensors["extra"] = testing::StoreF32({1}, {0});
  EXPECT_EQ(FaultOf(tensors),
            "backbone.norm_f.weight: is missing; "
            "backbone.layers.1.mixer.D: has shape [1, 48], the config asks for [48]; "
            "extra: is not a tensor of this model");

  const std::string fault = FaultOf({});  // 2 + 2 x 10 tensors
  EXPECT_THAT(fault, HasSubstr("; and 2 more"));
  EXPECT_EQ(std::count(fault.begin(), fault.end(), ';'), 20);
}

TEST_F(WeightsFolder, MissingFilesAreNotFound) {
  auto weights = Load();
  EXPECT_EQ(weights.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(weights.status().message(), folder_ + "/config.json: there is no such file");
  Write(testing::RandomWeights({}));
  std::filesystem::remove(folder_ + "/model.safetensors");
  weights = Load();
  EXPECT_EQ(weights.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(weights.status().message()), HasSubstr(folder_ + "/model.safetensors: "));
}

}  // namespace
}  // namespace mambascope::model
