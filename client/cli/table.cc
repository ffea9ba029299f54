#include "client/cli/table.h"

#include <algorithm>

#include "client/cli/terminal.h"

namespace mambascope::cli {

void PrintTable(const std::vector<TableRow>& rows, int indent, std::ostream& out) {
  std::vector<int> widths;
  for (const TableRow& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], DisplayWidth(row[i]));
  }
  for (const TableRow& row : rows) {
    out << std::string(indent, ' ');
    for (size_t i = 0; i < row.size(); ++i) {
      if (i + 1 == row.size()) {
        out << row[i] << "\n";
      } else {
        out << Fitted(row[i], widths[i]) << "  ";
      }
    }
  }
}

}  // namespace mambascope::cli
