#pragma once

#include <ostream>

#include "client/cli/terminal.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// The report as a small table: each number beside that of random orders with its interval, and
// whether it is better; then in words whether the model agrees with the scores.
void RenderFaithfulness(const Screen& screen, const v1::FaithfulnessReport& report,
                        std::ostream& out);

}  // namespace mambascope::cli
