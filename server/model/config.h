#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/kernels/activation.h"

namespace mambascope::model {

// The shape of a Mamba model, read from a Hugging Face config.json (methods.md, section 1).
struct ModelConfig {
  std::string family;  // model_type: "mamba"
  int32_t vocabulary = 0;
  int32_t d_model = 0;
  int32_t d_inner = 0;  // intermediate_size, else expand x hidden_size
  int32_t d_state = 0;  // 1..256
  int32_t d_conv = 0;   // conv_kernel, 1..16
  int32_t dt_rank = 0;  // time_step_rank; "auto" = ceil(d_model / 16)
  int32_t layers = 0;
  float norm_eps = 1e-5f;
  bool use_bias = false;  // of in_proj and out_proj
  bool use_conv_bias = true;
  bool tied_embeddings = true;  // the head is the embedding matrix
  kernels::Activation conv_activation = kernels::Activation::kSilu;
  std::vector<int32_t> end_of_text;  // eos_token_id: generation ends after any of these
};

// kInvalidArgument names the key, its value and what is allowed, all faults at once; another
// architecture (model_type) is refused by name. Unknown keys are ignored, as everywhere in the
// field.
absl::StatusOr<ModelConfig> ParseConfig(absl::string_view json);

}  // namespace mambascope::model
