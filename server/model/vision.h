#pragma once

#include <span>

#include "server/base/thread_pool.h"
#include "server/model/mamba_model.h"

namespace mambascope::model {

// patch_embed's inputs in row-major order, each in the order of its weight (channel, y, x):
// image [3, S, S] -> rows [patches, 3 patch_size patch_size].
void CopyPatches(const VisionConfig& vision, std::span<const float> image, float* rows);

// An image's tokens as the first layer reads them: patches in row-major order through patch_embed,
// the class token among them, plus pos_embed (methods.md, section 1; arXiv 2401.09417, eq. 3).
// image [3, S, S] normalised; h [vision.tokens(), d_model].
void EmbedImage(ThreadPool& pool, const ModelConfig& config, const PatchWeights& weights,
                std::span<const float> image, Workspace& workspace, float* h);

}  // namespace mambascope::model
