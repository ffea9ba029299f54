#pragma once

#include "mambascope/v1/prediction.pb.h"
#include "server/explain/method.h"
#include "server/explain/violations.h"

namespace mambascope::explain {

// How a request wants its tensors.

// Adds everything that is wrong with it, under "delivery.".
void CheckDelivery(const v1::Delivery& delivery, Violations& violations);

// FP32 where nothing is said.
v1::DataType FloatTypeOf(const v1::Delivery& delivery);

// Makes sparse what is asked for and can be: float tensors of at least one element whose last axis
// is `input_tokens`. Counts what the writer holds. `plan` is that of a method for
// FloatTypeOf(delivery), with all of its tensors.
void ApplyDelivery(const v1::Delivery& delivery, Plan* plan);

}  // namespace mambascope::explain
