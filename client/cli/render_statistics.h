#pragma once

#include <ostream>

#include "client/cli/terminal.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// A line for each layer's map; nothing without layers.
void RenderStatistics(const Screen& screen, const v1::MapStatistics& statistics, std::ostream& out);

}  // namespace mambascope::cli
