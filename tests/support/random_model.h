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

// Sizes of a random model. The defaults are a Mamba-1, small and odd enough to catch a wrong
// stride.
struct RandomModel {
  std::string family = "mamba";  // or falcon_mamba, mamba2, vim
  int32_t vocabulary = 53, d_model = 24, d_inner = 48, d_state = 6, d_conv = 4, dt_rank = 3;
  int32_t layers = 2;
  bool use_bias = false, use_conv_bias = true, tied_embeddings = true;
  std::string conv_activation = "silu";
  // Mamba-2; d_inner counts no longer, dt_rank neither.
  int32_t heads = 6, head_dim = 5, groups = 2;
  double delta_min = 0, delta_max = 1e9;
  // A text classifier if there are classes; Vim always.
  int32_t classes = 0;
  std::string pooling = "last";
  int32_t image_size = 12, patch_size = 4, stride = 4;  // Vim
  uint64_t seed = 1;

  bool headed() const { return family == "mamba2"; }
  bool vision() const { return family == "vim"; }
  int32_t inner() const { return headed() ? heads * head_dim : d_inner; }
  int32_t conv_channels() const { return inner() + (headed() ? 2 * groups * d_state : 0); }
  int32_t in_proj_rows() const {
    return headed() ? inner() + conv_channels() + heads : 2 * inner();
  }
};

inline nlohmann::json RandomVisionConfig(const RandomModel& model) {
  return {{"model_type", "vim"},
          {"embed_dim", model.d_model},
          {"expand", model.d_inner / model.d_model},
          {"d_state", model.d_state},
          {"d_conv", model.d_conv},
          {"dt_rank", model.dt_rank},
          {"depth", model.layers},
          {"norm_epsilon", 1e-5},
          {"img_size", model.image_size},
          {"patch_size", model.patch_size},
          {"stride", model.stride},
          {"num_classes", model.classes},
          {"conv_activation", model.conv_activation}};
}

inline nlohmann::json RandomConfig(const RandomModel& model) {
  if (model.vision()) return RandomVisionConfig(model);
  nlohmann::json config = {{"model_type", model.family},
                           {"vocab_size", model.vocabulary},
                           {"hidden_size", model.d_model},
                           {"state_size", model.d_state},
                           {"conv_kernel", model.d_conv},
                           {"num_hidden_layers", model.layers},
                           {"layer_norm_epsilon", 1e-5},
                           {"use_bias", model.use_bias},
                           {"use_conv_bias", model.use_conv_bias},
                           {"hidden_act", "silu"},
                           {"conv_activation", model.conv_activation},
                           {"tie_word_embeddings", model.tied_embeddings},
                           {"eos_token_id", 0}};
  if (model.classes > 0) {
    config["architectures"] = {"MambaForSequenceClassification"};
    config["num_labels"] = model.classes;
    config["pooling"] = model.pooling;
  }
  if (model.headed()) {
    config["expand"] = model.inner() / model.d_model;
    config["num_heads"] = model.heads;
    config["head_dim"] = model.head_dim;
    config["n_groups"] = model.groups;
    config["time_step_limit"] = {model.delta_min, model.delta_max};
  } else {
    config["intermediate_size"] = model.d_inner;
    config["time_step_rank"] = model.dt_rank;
  }
  return config;
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

  const auto branch = [&](const std::string& mixer, const std::string& suffix) {
    matrix(mixer + "x_proj" + suffix + ".weight", m.dt_rank + 2 * m.d_state, m.d_inner);
    matrix(mixer + "dt_proj" + suffix + ".weight", m.d_inner, m.dt_rank);
    add(mixer + "dt_proj" + suffix + ".bias", {m.d_inner}, -4, 0);
    add(mixer + (suffix.empty() ? "A_log" : "A_b_log"), {m.d_inner, m.d_state}, -1, 2.5);
    add(mixer + "D" + suffix, {m.d_inner}, 0.5, 1.5);
  };
  const auto convolution = [&](const std::string& name) {
    add(name + ".weight", {m.conv_channels(), 1, m.d_conv}, -0.8, 0.8);
    if (m.use_conv_bias) add(name + ".bias", {m.conv_channels()}, -0.2, 0.2);
  };

  const std::string root = m.vision() ? "" : "backbone.";
  if (m.vision()) {
    const int32_t side = (m.image_size - m.patch_size) / m.stride + 1;
    add("patch_embed.proj.weight", {m.d_model, 3, m.patch_size, m.patch_size}, -0.3, 0.3);
    add("patch_embed.proj.bias", {m.d_model}, -0.2, 0.2);
    add("cls_token", {1, 1, m.d_model}, -1, 1);
    add("pos_embed", {1, side * side + 1, m.d_model}, -0.5, 0.5);
  } else {
    add("backbone.embeddings.weight", {m.vocabulary, m.d_model}, -1, 1);
  }
  for (int32_t l = 0; l < m.layers; ++l) {
    const std::string prefix = root + "layers." + std::to_string(l) + ".";
    const std::string mixer = prefix + "mixer.";
    add(prefix + "norm.weight", {m.d_model}, 0.5, 1.5);
    matrix(mixer + "in_proj.weight", m.in_proj_rows(), m.d_model);
    if (m.use_bias) add(mixer + "in_proj.bias", {m.in_proj_rows()}, -0.2, 0.2);
    convolution(mixer + "conv1d");
    if (m.headed()) {
      add(mixer + "dt_bias", {m.heads}, -4, 0);
      add(mixer + "A_log", {m.heads}, -1, 2.5);
      add(mixer + "D", {m.heads}, 0.5, 1.5);
      add(mixer + "norm.weight", {m.inner()}, 0.5, 1.5);
    } else {
      branch(mixer, "");
    }
    if (m.vision()) {
      convolution(mixer + "conv1d_b");
      branch(mixer, "_b");
    }
    matrix(mixer + "out_proj.weight", m.d_model, m.inner());
    if (m.use_bias) add(mixer + "out_proj.bias", {m.d_model}, -0.2, 0.2);
  }
  add(root + "norm_f.weight", {m.d_model}, 0.5, 1.5);
  if (m.classes > 0) {
    const std::string head = m.vision() ? "head" : "score";
    matrix(head + ".weight", m.classes, m.d_model);
    add(head + ".bias", {m.classes}, -0.2, 0.2);
  } else if (!m.tied_embeddings) {
    matrix("lm_head.weight", m.vocabulary, m.d_model);
  }
  return tensors;
}

// Writes config.json and model.safetensors into `folder`, which is made if need be.
inline void WriteRandomModel(const std::string& folder, const RandomModel& model) {
  std::filesystem::create_directories(folder);
  WriteBytes(folder + "/config.json", RandomConfig(model).dump(2));
  WriteSafetensors(folder + "/model.safetensors", RandomWeights(model));
}

}  // namespace mambascope::testing
