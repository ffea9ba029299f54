#pragma once

#include <ostream>
#include <span>

#include "client/cli/terminal.h"

namespace mambascope::cli {

// One value for each token of an image, whose patches are a square: the patches as a picture, the
// class token (at `class_position`) and the largest patches by row and column. False, and nothing
// is drawn, if they are no square.
bool RenderPatches(const Screen& screen, std::span<const float> values, int class_position,
                   std::ostream& out);

}  // namespace mambascope::cli
