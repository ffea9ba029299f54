#include "client/cli/render_map.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cli/heat_scale.h"

namespace mambascope::cli {
namespace {

constexpr int64_t kLargestMap = 40;  // tokens of a map that is drawn cell by cell
constexpr int64_t kMostLines = 120;  // of maps for one explanation
constexpr size_t kMostSlabs = 128;   // lines of the short form

bool IsTokens(const v1::TensorInfo::Axis& axis) {
  return axis.name() == "tokens" || absl::EndsWith(axis.name(), "_tokens");
}

int64_t Label(const v1::TensorInfo::Axis& axis, int64_t index) {
  return index < axis.labels_size() ? axis.labels(static_cast<int>(index)) : index;
}

// Where on the axis stands the entry for `position`; -1 if nowhere.
int64_t IndexOf(const v1::TensorInfo::Axis& axis, int64_t position) {
  if (axis.labels_size() == 0) return position < axis.size() ? position : -1;
  for (int i = 0; i < axis.labels_size() && i < axis.size(); ++i) {
    if (axis.labels(i) == position) return i;
  }
  return -1;
}

// "layer 3, channel 17" for the index-th combination of the leading axes.
std::string SlabTitle(const v1::TensorInfo& info, int leading, int64_t index) {
  std::string title;
  for (int axis = leading - 1; axis >= 0; --axis) {
    const v1::TensorInfo::Axis& described = info.axes(axis);
    const std::string name(absl::StripSuffix(described.name(), "s"));
    title = absl::StrCat(name, " ", Label(described, index % described.size()),
                         title.empty() ? "" : ", ", title);
    index /= described.size();
  }
  return title;
}

// A block map: `rows` x `columns` values, row-major.
struct Map {
  std::string title;
  std::span<const float> values;
  int64_t rows, columns;
  bool causal;  // nothing above the diagonal: left blank rather than white

  bool blank(int64_t i, int64_t j) const { return i >= rows || (causal && j > i); }
  float at(int64_t i, int64_t j) const { return values[i * columns + j]; }
};

bool IsCausal(std::span<const float> values, int64_t rows, int64_t columns) {
  if (rows != columns) return false;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i + 1; j < columns; ++j) {
      if (values[i * columns + j] != 0) return false;
    }
  }
  return true;
}

// One line of a map: two rows, one above the other in each character, or one row where there are no
// half blocks to draw with.
std::string MapLine(const Screen& screen, const HeatScale& scale, const Map& map, int64_t line) {
  std::string drawn;
  for (int64_t j = 0; j < map.columns; ++j) {
    if (!screen.utf8) {
      if (map.blank(line, j)) {
        drawn += ' ';
      } else {
        absl::StrAppend(&drawn, Background(screen, HeatColor(screen, scale, map.at(line, j))), " ",
                        Reset(screen));
      }
      continue;
    }
    const int64_t upper = 2 * line, lower = 2 * line + 1;
    if (map.blank(upper, j) && map.blank(lower, j)) {
      drawn += ' ';
    } else if (map.blank(upper, j)) {
      absl::StrAppend(&drawn, Foreground(screen, HeatColor(screen, scale, map.at(lower, j))),
                      "\u2584", Reset(screen));
    } else {
      absl::StrAppend(
          &drawn, Foreground(screen, HeatColor(screen, scale, map.at(upper, j))),
          map.blank(lower, j) ? "" : Background(screen, HeatColor(screen, scale, map.at(lower, j))),
          "\u2580", Reset(screen));
    }
  }
  return drawn;
}

int64_t MapLines(const Screen& screen, int64_t rows) { return screen.utf8 ? (rows + 1) / 2 : rows; }

int MapWidth(const Map& map) {
  return std::max(static_cast<int>(map.columns), DisplayWidth(map.title));
}

// Maps side by side, as many as fit.
void RenderMaps(const Screen& screen, const HeatScale& scale, std::span<const Map> maps,
                std::ostream& out) {
  int widest = 1;
  for (const Map& map : maps) widest = std::max(widest, MapWidth(map));
  const size_t across = std::max(1, screen.width / (widest + 2));
  for (size_t first = 0; first < maps.size(); first += across) {
    const auto band = maps.subspan(first, std::min(across, maps.size() - first));
    for (const Map& map : band)
      out << "  " << Dim(screen) << Fitted(map.title, widest) << Reset(screen);
    out << "\n";
    for (int64_t line = 0; line < MapLines(screen, band[0].rows); ++line) {
      for (const Map& map : band) {
        out << "  " << MapLine(screen, scale, map, line)
            << std::string(widest - static_cast<int>(map.columns), ' ');
      }
      out << "\n";
    }
  }
  out << "  " << Legend(screen, scale) << "\n";
}

float LargerBySize(float a, float b) { return std::abs(b) > std::abs(a) || std::isnan(a) ? b : a; }

// A line for each row: its title, the row squeezed into few columns (each shows the largest by size
// of the tokens it stands for), and the token that weighs most.
struct Row {
  std::string title;
  std::span<const float> values;
};

void RenderRowLines(const Screen& screen, std::span<const Row> rows,
                    std::span<const TokenLabel> tokens, std::ostream& out) {
  std::vector<float> all;
  int title = 0;
  for (const Row& row : rows) {
    all.insert(all.end(), row.values.begin(), row.values.end());
    title = std::max(title, DisplayWidth(row.title));
  }
  const HeatScale scale = FitScale(all);
  const int64_t length = rows.empty() ? 0 : static_cast<int64_t>(rows[0].values.size());
  const int64_t cells = std::min<int64_t>(length, std::max(10, screen.width - title - 36));
  const size_t shown = std::min(rows.size(), kMostSlabs);
  for (const Row& row : rows.first(shown)) {
    out << "  " << Dim(screen) << Fitted(row.title, title) << Reset(screen) << "  ";
    for (int64_t cell = 0; cell < cells; ++cell) {
      const int64_t begin = cell * length / cells, end = (cell + 1) * length / cells;
      float value = row.values[begin];
      for (int64_t j = begin + 1; j < end; ++j) value = LargerBySize(value, row.values[j]);
      if (screen.color) {
        out << Background(screen, HeatColor(screen, scale, value)) << " ";
      } else {
        out << Shade(scale, value);
      }
    }
    out << Reset(screen);
    if (length > 0) {
      const auto strongest =
          std::max_element(row.values.begin(), row.values.end(), [](float a, float b) {
            return !std::isnan(b) && (std::isnan(a) || std::abs(a) < std::abs(b));
          });
      const auto position = strongest - row.values.begin();
      out << "  " << Fitted(Number(*strongest), 10) << " ";
      if (position < static_cast<int64_t>(tokens.size())) {
        const std::string text = Escaped(tokens[position].text, screen.utf8, Spaces::kVisible);
        out << Fitted(text, std::min(DisplayWidth(text), 14)) << " ";
      }
      out << Dim(screen) << "@" << position << Reset(screen);
    }
    out << "\n";
  }
  if (rows.size() > shown) out << "  ... " << rows.size() - shown << " more\n";
  out << (screen.color ? "  " : "  size: ") << Legend(screen, scale) << "\n";
}

void RenderStack(const Screen& screen, const v1::TensorInfo& info, std::span<const float> values,
                 std::span<const TokenLabel> tokens, int target_position, std::ostream& out) {
  const int leading = info.axes_size() - 2;
  const v1::TensorInfo::Axis& row_axis = info.axes(leading);
  const int64_t rows = row_axis.size(), columns = info.axes(leading + 1).size();
  const int64_t slabs = static_cast<int64_t>(values.size()) / (rows * columns);
  const auto slab = [&](int64_t i) { return values.subspan(i * rows * columns, rows * columns); };
  const int64_t across = std::max<int64_t>(1, screen.width / (std::max<int64_t>(columns, 10) + 2));
  const int64_t lines = (slabs + across - 1) / across * (MapLines(screen, rows) + 1);
  if (screen.color && std::max(rows, columns) <= kLargestMap && columns + 2 <= screen.width &&
      lines <= kMostLines) {
    std::vector<Map> maps;
    for (int64_t i = 0; i < slabs; ++i) {
      maps.push_back(
          {SlabTitle(info, leading, i), slab(i), rows, columns, IsCausal(slab(i), rows, columns)});
    }
    RenderMaps(screen, FitScale(values), maps, out);
    return;
  }
  int64_t row = IndexOf(row_axis, target_position);
  if (row < 0) row = rows - 1;
  out << "  row of position " << Label(row_axis, row) << "\n";
  std::vector<Row> strips;
  for (int64_t i = 0; i < slabs; ++i) {
    strips.push_back({SlabTitle(info, leading, i), slab(i).subspan(row * columns, columns)});
  }
  RenderRowLines(screen, strips, tokens, out);
}

// The tokens that the entries of an axis stand for; empty if that cannot be told.
std::vector<TokenLabel> TokensOf(const v1::TensorInfo::Axis& axis,
                                 std::span<const TokenLabel> tokens, int target_position) {
  const auto count = static_cast<int64_t>(tokens.size());
  std::vector<TokenLabel> chosen;
  if (axis.labels_size() == axis.size()) {
    for (const int32_t label : axis.labels()) {
      if (label < 0 || label >= count) return {};
      chosen.push_back(tokens[label]);
    }
    return chosen;
  }
  if (axis.size() != count && axis.size() != count - 1) return {};
  chosen.assign(tokens.begin(), tokens.end());
  if (axis.size() == count) return chosen;
  // The code's variants drop the target's own entry.
  if (target_position < 0 || target_position >= count) return {};
  chosen.erase(chosen.begin() + target_position);
  return chosen;
}

void RenderSummary(std::span<const float> values, std::ostream& out) {
  double sum = 0;
  for (const float value : values) sum += value;
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  out << "  smallest " << Number(*least) << ", mean "
      << Number(static_cast<float>(sum / static_cast<double>(values.size()))) << ", largest "
      << Number(*most) << " of " << values.size() << " values; --output writes them all\n";
}

}  // namespace

void RenderTensor(const Screen& screen, const v1::TensorInfo& info, std::span<const float> values,
                  std::span<const TokenLabel> tokens, int target_position, std::ostream& out) {
  const int axes = info.axes_size();
  if (values.empty()) {
    out << "  no values\n";
    return;
  }
  const bool of_tokens = axes > 0 && IsTokens(info.axes(axes - 1));
  if (axes == 1 && of_tokens) {
    const std::vector<TokenLabel> chosen = TokensOf(info.axes(0), tokens, target_position);
    if (chosen.empty()) {
      RenderSummary(values, out);
    } else {
      RenderRow(screen, chosen, values, out);
    }
  } else if (axes >= 2 && of_tokens && IsTokens(info.axes(axes - 2))) {
    RenderStack(screen, info, values, tokens, target_position, out);
  } else if (axes >= 2 && of_tokens) {
    const int64_t columns = info.axes(axes - 1).size();
    std::vector<Row> rows;
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()) / columns; ++i) {
      rows.push_back({SlabTitle(info, axes - 1, i), values.subspan(i * columns, columns)});
    }
    RenderRowLines(screen, rows, tokens, out);
  } else {
    RenderSummary(values, out);
  }
}

void RenderGrid(const Screen& screen, std::span<const float> values, int64_t rows, int64_t columns,
                std::ostream& out) {
  const HeatScale scale = FitScale(values);
  if (screen.color) {
    const Map map = {"", values, rows, columns, /*causal=*/false};
    for (int64_t line = 0; line < MapLines(screen, rows); ++line) {
      out << "  " << MapLine(screen, scale, map, line) << "\n";
    }
  } else {
    for (int64_t i = 0; i < rows; ++i) {
      out << "  ";
      for (const float value : values.subspan(i * columns, columns)) {
        out << std::string(2, Shade(scale, value));  // cells are about as high as two are wide
      }
      out << "\n";
    }
  }
  out << (screen.color ? "  " : "  size: ") << Legend(screen, scale) << "\n";
}

}  // namespace mambascope::cli
