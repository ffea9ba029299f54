#pragma once

#include <cstdint>
#include <map>
#include <ostream>
#include <span>
#include <string>

#include "client/cli/render_text.h"
#include "client/cli/terminal.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// Readable texts of the ids that an answer happened to name; the wire has no vocabulary. Others are
// `prefix` and their number: "#17", "class 3".
struct PieceNames {
  std::map<int32_t, std::string> known;
  std::string prefix = "#";
};

// The tensors of a lens, `values` and `ids` [layers, positions or sources, rank], as a line for
// each layer and position with as many of its best tokens as fit.
void RenderLens(const Screen& screen, const v1::TensorInfo& info, std::span<const float> values,
                std::span<const int32_t> ids, std::span<const TokenLabel> tokens,
                const PieceNames& pieces, std::ostream& out);

}  // namespace mambascope::cli
