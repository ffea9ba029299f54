#pragma once

#include <cstdint>
#include <ostream>
#include <span>

#include "client/cli/render_text.h"
#include "client/cli/terminal.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// Draws an explanation's main tensor (`values` has the size that `info` says) by the names of its
// axes, in a size that does not grow with the tensor:
//   [tokens]                      RenderRow; a row of L - 1 lacks the target's own entry
//   [..., output, input tokens]   a block map for each layer (channel, state) if they are small,
//   else
//                                 the row of `target_position` for each of them
//   [..., tokens]                 a line for each of the leading entries
//   anything else                 its smallest, mean and largest value
// `target_position` is a position of the input.
void RenderTensor(const Screen& screen, const v1::TensorInfo& info, std::span<const float> values,
                  std::span<const TokenLabel> tokens, int target_position, std::ostream& out);

// [rows, columns] values, row-major, as a picture: blocks of colour, or marks without it.
void RenderGrid(const Screen& screen, std::span<const float> values, int64_t rows, int64_t columns,
                std::ostream& out);

}  // namespace mambascope::cli
