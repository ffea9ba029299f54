#include "client/cli/render_lens.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cli/heat_scale.h"
#include "client/cli/table.h"

namespace mambascope::cli {
namespace {

constexpr size_t kMostLines = 200;
constexpr int kLayerColumns = 5, kIndent = 4;

int64_t Label(const v1::TensorInfo::Axis& axis, int64_t index) {
  return index < axis.labels_size() ? axis.labels(static_cast<int>(index)) : index;
}

std::string TokenName(const Screen& screen, int32_t id, const PieceNames& pieces) {
  const auto known = pieces.known.find(id);
  return known == pieces.known.end() ? absl::StrCat(pieces.prefix, id)
                                     : Escaped(known->second, screen.utf8, Spaces::kVisible);
}

std::string PositionName(const Screen& screen, int64_t position,
                         std::span<const TokenLabel> tokens) {
  if (position < 0 || position >= static_cast<int64_t>(tokens.size())) {
    return absl::StrCat("@", position);
  }
  const std::string text = Escaped(tokens[position].text, screen.utf8, Spaces::kVisible);
  return absl::StrCat("@", position, " ", Fitted(text, std::min(DisplayWidth(text), 14)));
}

// "Paris +12.3  London +11.8": as many as fit, at least one.
std::string Ranking(const Screen& screen, std::span<const float> values,
                    std::span<const int32_t> ids, const PieceNames& pieces, int width) {
  std::string line;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    const std::string entry =
        absl::StrCat(TokenName(screen, ids[rank], pieces), " ", Number(values[rank]));
    if (rank > 0 && DisplayWidth(line) + 2 + DisplayWidth(entry) > width) break;
    absl::StrAppend(&line, rank > 0 ? "  " : "", entry);
  }
  return line;
}

}  // namespace

void RenderLens(const Screen& screen, const v1::TensorInfo& info, std::span<const float> values,
                std::span<const int32_t> ids, std::span<const TokenLabel> tokens,
                const PieceNames& pieces, std::ostream& out) {
  if (info.axes_size() != 3 || ids.size() != values.size() || values.empty()) return;
  const int64_t positions = info.axes(1).size(), top = info.axes(2).size();
  const auto lines = static_cast<int64_t>(values.size()) / top;
  std::vector<TableRow> rows = {
      {"layer", std::string(absl::StripSuffix(info.axes(1).name(), "s")), "best tokens"}};
  int column = DisplayWidth(rows[0][1]);
  for (int64_t p = 0; p < positions; ++p) {
    column = std::max(column, DisplayWidth(PositionName(screen, Label(info.axes(1), p), tokens)));
  }
  const int width = screen.width - kIndent - kLayerColumns - column - 4;
  for (int64_t line = 0; line < std::min<int64_t>(lines, kMostLines); ++line) {
    rows.push_back({absl::StrCat(Label(info.axes(0), line / positions)),
                    PositionName(screen, Label(info.axes(1), line % positions), tokens),
                    Ranking(screen, values.subspan(line * top, top), ids.subspan(line * top, top),
                            pieces, width)});
  }
  PrintTable(rows, kIndent, out);
  if (lines > static_cast<int64_t>(kMostLines)) {
    out << "    ... " << lines - static_cast<int64_t>(kMostLines) << " more\n";
  }
}

}  // namespace mambascope::cli
