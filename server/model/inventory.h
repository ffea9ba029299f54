#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/model/config.h"
#include "server/model/weights.h"

namespace mambascope::model {

// What a tensor becomes: a matrix in its own dtype, fp32 numbers, or A = -exp(A_log), which is kept
// transposed where it has a row for each channel.
enum class Use { kMatrix, kNumbers, kDecay };

// A tensor that a checkpoint of some config holds, by its published name, and where its weights are
// wanted.
struct Expected {
  std::string name;
  std::vector<int64_t> shape;
  Use use = Use::kNumbers;
  const float** numbers = nullptr;          // of kNumbers and kDecay
  kernels::WeightMatrix* matrix = nullptr;  // of kMatrix
  bool optional = false;
};

inline constexpr char kLanguageHead[] = "lm_head.weight";

// All tensors of the config's model; sizes views.layers. `own_head`: whether the checkpoint has a
// kLanguageHead.
std::vector<Expected> ListTensors(const ModelConfig& config, bool own_head, WeightViews& views);

}  // namespace mambascope::model
