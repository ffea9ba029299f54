#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/kernels/gemm.h"
#include "server/model/config.h"

namespace mambascope::model {

// Matrices stay as they are stored, fp32 or bf16; everything else is fp32. Names and layout are the
// checkpoint's. Null where the config has none.

// One selective scan with the convolution before it; Vim has one for each direction.
struct BranchWeights {
  const float* conv1d = nullptr;  // [conv_channels, d_conv]
  const float* conv1d_bias = nullptr;
  kernels::WeightMatrix x_proj;    // [dt_rank + 2 d_state, d_inner]  dt, then B, then C
  kernels::WeightMatrix dt_proj;   // [d_inner, dt_rank]
  const float* dt_bias = nullptr;  // [d_inner] of dt_proj; Mamba-2: [heads]
  const float* A = nullptr;        // [d_state, d_inner] = -exp(A_log) transposed; Mamba-2: [heads]
  const float* D = nullptr;        // [d_inner]; Mamba-2: [heads]
};

struct LayerWeights {
  const float* norm = nullptr;    // [d_model]
  kernels::WeightMatrix in_proj;  // [in_proj_rows, d_model]  x_in, z; Mamba-2: z, xBC, dt
  const float* in_proj_bias = nullptr;
  BranchWeights branches[2];          // forward, and Vim's backward
  const float* mixer_norm = nullptr;  // [d_inner] Mamba-2's gated norm
  kernels::WeightMatrix out_proj;     // [d_model, d_inner]
  const float* out_proj_bias = nullptr;
};

// Vim: how patches become tokens.
struct PatchWeights {
  kernels::WeightMatrix proj;        // [d_model, 3 patch_size patch_size]
  const float* proj_bias = nullptr;  // [d_model]
  const float* cls_token = nullptr;  // [d_model]
  const float* pos_embed = nullptr;  // [tokens, d_model]
};

struct WeightViews {
  kernels::WeightMatrix embeddings;  // [vocabulary, d_model]; none of Vim
  PatchWeights patches;              // Vim
  std::vector<LayerWeights> layers;
  const float* norm_f = nullptr;     // [d_model]
  kernels::WeightMatrix head;        // [outputs, d_model]
  const float* head_bias = nullptr;  // [outputs]
};

// A model's weights: the checkpoint's own bytes, memory-mapped, where they are fp32, or bf16 of a
// matrix, and aligned; what else is narrower is widened once at load (exact). Threads: const after
// Load.
class Weights {
 public:
  // `folder` holds model.safetensors or its index and shards. kInvalidArgument names every tensor
  // that is missing, extra (other than a lm_head that a tied head does not need), of the wrong
  // shape or dtype, or not finite.
  static absl::StatusOr<std::unique_ptr<const Weights>> Load(const std::string& folder,
                                                             const ModelConfig& config);
  ~Weights();

  const WeightViews& views() const { return views_; }
  const LayerWeights& layer(int32_t l) const { return views_.layers[l]; }

  const std::string& stored_dtype() const { return stored_dtype_; }  // "F32", "BF16" or "mixed"
  int64_t stored_bytes() const { return stored_bytes_; }             // of all tensors in the file
  int64_t parameters() const { return parameters_; }
  // SHA-256 of config.json's bytes followed by the weight files' bytes, lower-case hexadecimal.
  const std::string& digest() const { return digest_; }

 private:
  struct Storage;  // the mapped files and LibTorch tensors behind the pointers
  Weights();

  std::unique_ptr<Storage> storage_;
  WeightViews views_;
  std::string stored_dtype_;
  int64_t stored_bytes_ = 0;
  int64_t parameters_ = 0;
  std::string digest_;
};

}  // namespace mambascope::model
