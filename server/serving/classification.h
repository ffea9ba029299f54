#pragma once

#include <span>

#include "mambascope/v1/prediction.pb.h"
#include "server/model/config.h"

namespace mambascope::serving {

// The `top` most probable classes (0: the default, 5), from logits [classes], finite.
v1::Classification Classify(std::span<const float> logits, const model::ModelConfig& config,
                            int32_t top);

// The tensor `logits` of a model: [vocabulary] or [classes].
v1::TensorInfo LogitsInfo(const model::ModelConfig& config);

}  // namespace mambascope::serving
