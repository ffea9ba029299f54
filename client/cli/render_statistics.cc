#include "client/cli/render_statistics.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/heat_scale.h"
#include "client/cli/table.h"

namespace mambascope::cli {

void RenderStatistics(const Screen& screen, const v1::MapStatistics& statistics,
                      std::ostream& out) {
  if (statistics.layers().empty()) return;
  out << "  " << Dim(screen) << "where the maps' mass lies, means over rows" << Reset(screen)
      << "\n";
  std::vector<TableRow> rows = {{"layer", "first token", "itself", "entropy", "distance"}};
  const auto cell = [](const auto& values, int i) {
    return i < values.size() ? absl::StrFormat("%.4g", values[i]) : std::string();
  };
  for (int i = 0; i < statistics.layers_size(); ++i) {
    rows.push_back({absl::StrCat(statistics.layers(i)), cell(statistics.first_share(), i),
                    cell(statistics.diagonal_share(), i), cell(statistics.entropy(), i),
                    cell(statistics.mean_distance(), i)});
  }
  PrintTable(rows, 4, out);
}

}  // namespace mambascope::cli
