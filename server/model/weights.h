#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/config.h"

namespace mambascope::model {

// One layer's weights, fp32, row-major, as the checkpoint names them. Null where the config has
// none.
struct LayerWeights {
  const float* norm = nullptr;     // [d_model]
  const float* in_proj = nullptr;  // [2 d_inner, d_model]  x_in, then z
  const float* in_proj_bias = nullptr;
  const float* conv1d = nullptr;  // [d_inner, d_conv]
  const float* conv1d_bias = nullptr;
  const float* x_proj = nullptr;        // [dt_rank + 2 d_state, d_inner]  dt, then B, then C
  const float* dt_proj = nullptr;       // [d_inner, dt_rank]
  const float* dt_proj_bias = nullptr;  // [d_inner]
  const float* A = nullptr;             // [d_state, d_inner] = -exp(A_log) transposed
  const float* D = nullptr;             // [d_inner]
  const float* out_proj = nullptr;      // [d_model, d_inner]
  const float* out_proj_bias = nullptr;
};

// A model's weights: the checkpoint's own bytes, memory-mapped, where they are fp32 and aligned;
// bf16 is widened once at load (exact). Threads: const after Load.
class Weights {
 public:
  // `folder` holds model.safetensors. kInvalidArgument names every tensor that is missing, extra
  // (other than a lm_head that a tied head does not need), of the wrong shape or dtype, or not
  // finite.
  static absl::StatusOr<std::unique_ptr<const Weights>> Load(const std::string& folder,
                                                             const ModelConfig& config);
  ~Weights();

  const float* embeddings() const { return embeddings_; }  // [vocabulary, d_model]
  const float* norm_f() const { return norm_f_; }          // [d_model]
  const float* head() const { return head_; }              // [vocabulary, d_model]
  const LayerWeights& layer(int32_t l) const { return layers_[l]; }

  const std::string& stored_dtype() const { return stored_dtype_; }  // "F32", "BF16" or "mixed"
  int64_t stored_bytes() const { return stored_bytes_; }             // of all tensors in the file
  int64_t parameters() const { return parameters_; }
  // SHA-256 of config.json's bytes followed by the weight files' bytes, lower-case hexadecimal.
  const std::string& digest() const { return digest_; }

 private:
  struct Storage;  // the mapped files and LibTorch tensors behind the pointers
  Weights();

  std::unique_ptr<Storage> storage_;
  const float* embeddings_ = nullptr;
  const float* norm_f_ = nullptr;
  const float* head_ = nullptr;
  std::vector<LayerWeights> layers_;
  std::string stored_dtype_;
  int64_t stored_bytes_ = 0;
  int64_t parameters_ = 0;
  std::string digest_;
};

}  // namespace mambascope::model
