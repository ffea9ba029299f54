#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/model/config.h"

namespace mambascope::explain {

// Scores of a square grid of patches, row-major, as an image [size, size]: bilinear with pixel
// centres (align_corners off), the outer patches repeated at the border (methods.md, section 8).
std::vector<float> Upsample(std::span<const float> patches, int32_t size);

// Scores of an image model's tokens [patches + 1], the class token's left out, upsampled to
// [image_size, image_size].
std::vector<float> PixelScores(std::span<const float> scores, const model::VisionConfig& vision);

}  // namespace mambascope::explain
