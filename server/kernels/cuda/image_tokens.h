#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace mambascope::kernels::cuda {

// The tokens of images from their embedded patches (Vision Mamba, arXiv 2401.09417, eq. 3): the
// class token at `class_position`, the patches around it in their order, plus positions. All device
// pointers, borrowed until `stream` has run the call.
struct ImageTokens {
  int64_t images = 0, tokens = 0;    // tokens of an image: its patches and one
  int64_t class_position = 0;        // in [0, tokens)
  int64_t cols = 0;                  // d_model
  const float* patches = nullptr;    // [images, tokens - 1, cols]
  const float* cls_token = nullptr;  // [cols]
  const float* pos_embed = nullptr;  // [tokens, cols] or null
};
// h [images, tokens, cols]
absl::Status PlaceImageTokens(const ImageTokens& in, float* h, cudaStream_t stream);

}  // namespace mambascope::kernels::cuda
