#include "server/model/inventory.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace mambascope::model {
namespace {

// Everything that a model of this config has.
class Inventory {
 public:
  explicit Inventory(const ModelConfig& config) : config_(config) {}

  void Numbers(std::string name, std::vector<int64_t> shape, const float** to) {
    tensors_.push_back({std::move(name), std::move(shape), Use::kNumbers, to, nullptr});
  }
  void Decay(std::string name, std::vector<int64_t> shape, const float** to) {
    tensors_.push_back({std::move(name), std::move(shape), Use::kDecay, to, nullptr});
  }
  void Matrix(std::string name, std::vector<int64_t> shape, kernels::WeightMatrix* to) {
    tensors_.push_back({std::move(name), std::move(shape), Use::kMatrix, nullptr, to});
  }
  void Optional() { tensors_.back().optional = true; }  // the tensor named last

  // `suffix`: of the backward direction's names.
  void Branch(const std::string& mixer, absl::string_view suffix, BranchWeights& branch) {
    const int64_t d_inner = config_.d_inner, d_state = config_.d_state;
    const auto named = [&](absl::string_view module, absl::string_view tensor) {
      return absl::StrCat(mixer, module, suffix, tensor);
    };
    Matrix(named("x_proj", ".weight"), {config_.dt_rank + 2 * d_state, d_inner}, &branch.x_proj);
    Matrix(named("dt_proj", ".weight"), {d_inner, config_.dt_rank}, &branch.dt_proj);
    Numbers(named("dt_proj", ".bias"), {d_inner}, &branch.dt_bias);
    Decay(suffix.empty() ? mixer + "A_log" : absl::StrCat(mixer, "A", suffix, "_log"),
          {d_inner, d_state}, &branch.A);
    Numbers(named("D", ""), {d_inner}, &branch.D);
    Conv(mixer, suffix, branch);
  }

  void Heads(const std::string& mixer, LayerWeights& layer) {
    BranchWeights& branch = layer.branches[0];
    Numbers(mixer + "dt_bias", {config_.heads}, &branch.dt_bias);
    Decay(mixer + "A_log", {config_.heads}, &branch.A);
    Numbers(mixer + "D", {config_.heads}, &branch.D);
    Numbers(mixer + "norm.weight", {config_.d_inner}, &layer.mixer_norm);
    Conv(mixer, "", branch);
  }

  void Layer(const std::string& prefix, LayerWeights& layer) {
    const std::string mixer = prefix + "mixer.";
    Numbers(prefix + "norm.weight", {config_.d_model}, &layer.norm);
    Matrix(mixer + "in_proj.weight", {config_.in_proj_rows(), config_.d_model}, &layer.in_proj);
    Matrix(mixer + "out_proj.weight", {config_.d_model, config_.d_inner}, &layer.out_proj);
    if (config_.use_bias) {
      Numbers(mixer + "in_proj.bias", {config_.in_proj_rows()}, &layer.in_proj_bias);
      Numbers(mixer + "out_proj.bias", {config_.d_model}, &layer.out_proj_bias);
    }
    if (config_.family == Family::kMamba2) {
      Heads(mixer, layer);
      return;
    }
    Branch(mixer, "", layer.branches[0]);
    if (config_.directions() == 2) Branch(mixer, "_b", layer.branches[1]);
  }

  void Patches(PatchWeights& patches) {
    const int64_t patch = config_.vision.patch_size, d_model = config_.d_model;
    Matrix("patch_embed.proj.weight", {d_model, 3, patch, patch}, &patches.proj);
    Numbers("patch_embed.proj.bias", {d_model}, &patches.proj_bias);
    Numbers("cls_token", {1, 1, d_model}, &patches.cls_token);
    if (config_.vision.absolute_positions) {
      Numbers("pos_embed", {1, config_.vision.tokens(), d_model}, &patches.pos_embed);
    }
  }

  void Head(const std::string& module, WeightViews& views) {
    Matrix(module + ".weight", {config_.classes, config_.d_model}, &views.head);
    Numbers(module + ".bias", {config_.classes}, &views.head_bias);
    Optional();
  }

  std::vector<Expected> Take() { return std::move(tensors_); }

 private:
  void Conv(const std::string& mixer, absl::string_view suffix, BranchWeights& branch) {
    const std::string conv = absl::StrCat(mixer, "conv1d", suffix);
    Numbers(conv + ".weight", {config_.conv_channels(), 1, config_.d_conv}, &branch.conv1d);
    if (config_.use_conv_bias) {
      Numbers(conv + ".bias", {config_.conv_channels()}, &branch.conv1d_bias);
    }
  }

  const ModelConfig& config_;
  std::vector<Expected> tensors_;
};

}  // namespace

std::vector<Expected> ListTensors(const ModelConfig& config, bool own_head, WeightViews& views) {
  Inventory inventory(config);
  const bool vision = config.family == Family::kVim;
  const std::string prefix = vision ? "" : "backbone.";
  if (vision) {
    inventory.Patches(views.patches);
  } else {
    inventory.Matrix(prefix + "embeddings.weight", {config.vocabulary, config.d_model},
                     &views.embeddings);
  }
  inventory.Numbers(prefix + "norm_f.weight", {config.d_model}, &views.norm_f);
  views.layers.resize(config.layers);
  for (int32_t l = 0; l < config.layers; ++l) {
    inventory.Layer(absl::StrCat(prefix, "layers.", l, "."), views.layers[l]);
  }
  if (config.task != Task::kNextToken) {
    inventory.Head(vision ? "head" : "score", views);
  } else if (!config.tied_embeddings && own_head) {
    inventory.Matrix(kLanguageHead, {config.vocabulary, config.d_model}, &views.head);
  }
  return inventory.Take();
}

}  // namespace mambascope::model
