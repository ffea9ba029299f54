#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "mambascope/v1/model.pb.h"
#include "server/serving/model_repository.h"

namespace mambascope::serving {

// What ModelService says of a served model.
v1::Model DescribeModel(const ServedModel& served, int32_t max_input_tokens);

// And of one that could not be loaded.
v1::Model DescribeFailed(const FailedModel& failed);

// What it says of a served model, with every method, priced with its default options for `length`
// tokens (0 = 128). kInvalidArgument if the length is outside 1 to max_input_tokens.
absl::StatusOr<v1::GetModelResponse> DescribeModelWithMethods(const ServedModel& served,
                                                              int32_t length,
                                                              int32_t max_input_tokens);

}  // namespace mambascope::serving
