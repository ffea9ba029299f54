#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/support/safetensors_io.h"

namespace mambascope::testing {

// Sizes of a random Mamba-1. The defaults are small and odd enough to catch a wrong stride.
struct RandomModel {
  int32_t vocabulary = 53, d_model = 24, d_inner = 48, d_state = 6, d_conv = 4, dt_rank = 3;
  int32_t layers = 2;
  bool use_bias = false, use_conv_bias = true, tied_embeddings = true;
  std::string conv_activation = "silu";
  uint64_t seed = 1;
};

inline nlohmann::json RandomConfig(const RandomModel& model) {
  return {{"model_type", "mamba"},
          {"architectures", {"MambaForCausalLM"}},
          {"vocab_size", model.vocabulary},
          {"hidden_size", model.d_model},
          {"intermediate_size", model.d_inner},
          {"state_size", model.d_state},
          {"conv_kernel", model.d_conv},
          {"time_step_rank", model.dt_rank},
          {"num_hidden_layers", model.layers},
          {"layer_norm_epsilon", 1e-5},
          {"use_bias", model.use_bias},
          {"use_conv_bias", model.use_conv_bias},
          {"hidden_act", "silu"},
          {"conv_activation", model.conv_activation},
          {"tie_word_embeddings", model.tied_embeddings},
          {"eos_token_id", 0}};
}

// Weights at the scales of a trained model: activations stay of order one through the layers,
// decays per token spread over (0, 1). The engine's bits are the standard's; the scaling is plain
// arithmetic.
inline StoredTensors RandomWeights(const RandomModel& m) {
  std::mt19937_64 random(m.seed);
  const auto uniform = [&](double low, double high) {
    return low + (high - low) * static_cast<double>(random() >> 11) * 0x1p-53;
  };
  StoredTensors tensors;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, double low,
                       double high) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(uniform(low, high));
    tensors[name] = StoreF32(std::move(shape), values);
  };
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols) {
    const double bound = std::sqrt(3.0 / static_cast<double>(cols));  // variance 1 / cols
    add(name, {rows, cols}, -bound, bound);
  };

  add("backbone.embeddings.weight", {m.vocabulary, m.d_model}, -1, 1);
  for (int32_t l = 0; l < m.layers; ++l) {
    const std::string prefix = "backbone.layers." + std::to_string(l) + ".";
    const std::string mixer = prefix + "mixer.";
    add(prefix + "norm.weight", {m.d_model}, 0.5, 1.5);
    matrix(mixer + "in_proj.weight", 2 * m.d_inner, m.d_model);
    if (m.use_bias) add(mixer + "in_proj.bias", {2 * m.d_inner}, -0.2, 0.2);
    add(mixer + "conv1d.weight", {m.d_inner, 1, m.d_conv}, -0.8, 0.8);
    if (m.use_conv_bias) add(mixer + "conv1d.bias", {m.d_inner}, -0.2, 0.2);
    matrix(mixer + "x_proj.weight", m.dt_rank + 2 * m.d_state, m.d_inner);
    matrix(mixer + "dt_proj.weight", m.d_inner, m.dt_rank);
    add(mixer + "dt_proj.bias", {m.d_inner}, -4, 0);
    add(mixer + "A_log", {m.d_inner, m.d_state}, -1, 2.5);
    add(mixer + "D", {m.d_inner}, 0.5, 1.5);
    matrix(mixer + "out_proj.weight", m.d_model, m.d_inner);
    if (m.use_bias) add(mixer + "out_proj.bias", {m.d_model}, -0.2, 0.2);
  }
  add("backbone.norm_f.weight", {m.d_model}, 0.5, 1.5);
  if (!m.tied_embeddings) matrix("lm_head.weight", m.vocabulary, m.d_model);
  return tensors;
}

// Writes config.json and model.safetensors into `folder`, which is made if need be.
inline void WriteRandomModel(const std::string& folder, const RandomModel& model) {
  std::filesystem::create_directories(folder);
  WriteBytes(folder + "/config.json", RandomConfig(model).dump(2));
  WriteSafetensors(folder + "/model.safetensors", RandomWeights(model));
}

}  // namespace mambascope::testing
