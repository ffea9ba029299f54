#pragma once

#include <cstdint>
#include <string>

#include "mambascope/v1/prediction.pb.h"
#include "server/explain/violations.h"
#include "server/serving/call.h"
#include "server/serving/model_repository.h"

namespace mambascope::serving {

// What an explanation's target names, as far as the request says: fills the planned explanation's
// position, generated range, tokens, token and contrast, and adds all that is wrong with it.
// `tokens`: of the prompt. `field`: the target's path in the request.
void ResolveTarget(const v1::PredictRequest& request, const v1::Target& target, int64_t tokens,
                   const ServedModel& model, const std::string& field, PlannedExplanation& planned,
                   explain::Violations& violations);

}  // namespace mambascope::serving
