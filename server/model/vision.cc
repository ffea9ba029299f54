#include "server/model/vision.h"

#include <algorithm>

#include "server/kernels/gemm.h"

namespace mambascope::model {
namespace {

// Patch `index` as a row; returns its end.
float* CopyPatch(const VisionConfig& vision, const float* image, int32_t index, float* row) {
  const int64_t size = vision.image_size, patch = vision.patch_size;
  const int64_t top = index / vision.patches_per_side() * vision.stride;
  const int64_t left = index % vision.patches_per_side() * vision.stride;
  for (int64_t channel = 0; channel < 3; ++channel) {
    for (int64_t y = 0; y < patch; ++y) {
      row = std::copy_n(image + (channel * size + top + y) * size + left, patch, row);
    }
  }
  return row;
}

}  // namespace

void CopyPatches(const VisionConfig& vision, std::span<const float> image, float* rows) {
  for (int32_t i = 0; i < vision.patches(); ++i) rows = CopyPatch(vision, image.data(), i, rows);
}

void EmbedImage(ThreadPool& pool, const ModelConfig& config, const PatchWeights& weights,
                std::span<const float> image, Workspace& workspace, float* h) {
  const VisionConfig& vision = config.vision;
  const int64_t patches = vision.patches(), d_model = config.d_model;
  const int64_t pixels = 3ll * vision.patch_size * vision.patch_size;
  workspace.patches.Reserve(patches * pixels);
  workspace.embedded.Reserve(patches * d_model);
  CopyPatches(vision, image, workspace.patches.data());
  kernels::Linear(pool, {workspace.patches.data(), patches, pixels, pixels}, weights.proj,
                  weights.proj_bias, {workspace.embedded.data(), patches, d_model, d_model});

  const int64_t class_position = vision.class_position();
  const float* from = workspace.embedded.data();
  for (int64_t i = 0; i < vision.tokens(); ++i) {
    const bool is_class = i == class_position;
    std::copy_n(is_class ? weights.cls_token : from, d_model, h + i * d_model);
    if (!is_class) from += d_model;
  }
  if (weights.pos_embed == nullptr) return;
  for (int64_t i = 0; i < vision.tokens() * d_model; ++i) h[i] += weights.pos_embed[i];
}

}  // namespace mambascope::model
