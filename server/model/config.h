#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/kernels/activation.h"

namespace mambascope::model {

// The mixer of every layer (methods.md, section 1): Mamba-1 (arXiv 2312.00752), Falcon-Mamba, which
// normalises the selective parameters (arXiv 2410.05355), Mamba-2 (arXiv 2405.21060), and Vision
// Mamba, which scans both ways (arXiv 2401.09417).
enum class Family { kMamba, kFalconMamba, kMamba2, kVim };
absl::string_view Name(Family family);  // the config's model_type: "mamba", ...

enum class Task { kNextToken, kTextClass, kImageClass };

// What a text classifier's head reads: the last token, or the mean over all of them.
enum class Pooling { kLast, kMean };

// How an image becomes tokens: square patches in row-major order and one class token among them.
struct VisionConfig {
  int32_t image_size = 0, patch_size = 0, stride = 0;  // pixels
  bool middle_class_token = true;                      // else it comes first
  bool absolute_positions = true;                      // pos_embed is added
  bool divide_out = true;                              // out_proj reads half the sum of both scans

  int32_t patches_per_side() const { return (image_size - patch_size) / stride + 1; }
  int32_t patches() const { return patches_per_side() * patches_per_side(); }
  int32_t tokens() const { return patches() + 1; }
  int32_t class_position() const { return middle_class_token ? patches() / 2 : 0; }
};

// The shape of a model, read from its config.json.
struct ModelConfig {
  Family family = Family::kMamba;
  Task task = Task::kNextToken;
  int32_t vocabulary = 0;  // 0 for image models
  int32_t classes = 0;     // of classifiers
  int32_t d_model = 0;
  int32_t d_inner = 0;  // intermediate_size, else expand x hidden_size
  int32_t d_state = 0;  // 1..256
  int32_t d_conv = 0;   // conv_kernel, 1..16
  int32_t dt_rank = 0;  // time_step_rank; "auto" = ceil(d_model / 16); 0 for Mamba-2
  int32_t layers = 0;
  float norm_eps = 1e-5f;
  bool use_bias = false;  // of in_proj and out_proj
  bool use_conv_bias = true;
  bool tied_embeddings = true;  // the head is the embedding matrix
  kernels::Activation conv_activation = kernels::Activation::kSilu;
  float mixer_rms_eps = 1e-6f;  // Falcon-Mamba

  // Mamba-2: d_inner = heads x head_dim; head h reads the B and C of group h / (heads / groups).
  int32_t heads = 0, head_dim = 0, groups = 1;
  float delta_min = 0;  // time_step_limit, applied at every step
  float delta_max = std::numeric_limits<float>::infinity();

  VisionConfig vision;
  Pooling pooling = Pooling::kLast;
  std::vector<std::string> class_labels;  // id2label: [classes] or empty
  std::vector<int32_t> end_of_text;       // eos_token_id: generation ends after any of these

  int32_t outputs() const { return task == Task::kNextToken ? vocabulary : classes; }
  int32_t directions() const { return family == Family::kVim ? 2 : 1; }
  bool mean_pooled() const { return task == Task::kTextClass && pooling == Pooling::kMean; }
  // Independent hidden-attention maps of a layer and direction: one a channel, or of Mamba-2 a
  // head.
  int32_t maps() const { return family == Family::kMamba2 ? heads : d_inner; }
  int32_t channels_per_map() const { return family == Family::kMamba2 ? head_dim : 1; }
  // Channels that the convolution runs over: Mamba-2's B and C too.
  int32_t conv_channels() const {
    return family == Family::kMamba2 ? d_inner + 2 * groups * d_state : d_inner;
  }
  int32_t in_proj_rows() const {
    return family == Family::kMamba2 ? d_inner + conv_channels() + heads : 2 * d_inner;
  }
  // Numbers a token from which a scan's parameters follow: x_proj's output, or Mamba-2's dt, B, C.
  int32_t selective_width() const {
    return family == Family::kMamba2 ? heads + 2 * groups * d_state : dt_rank + 2 * d_state;
  }
};

// kInvalidArgument names the key, its value and what is allowed, all faults at once; another
// architecture (model_type) is refused by name. Unknown keys are ignored, as everywhere in the
// field.
absl::StatusOr<ModelConfig> ParseConfig(absl::string_view json);

}  // namespace mambascope::model
