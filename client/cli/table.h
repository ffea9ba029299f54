#pragma once

#include <ostream>
#include <string>
#include <vector>

namespace mambascope::cli {

using TableRow = std::vector<std::string>;  // escaped cells

// Columns as wide as their widest cell, two spaces apart; the last one is not filled up.
void PrintTable(const std::vector<TableRow>& rows, int indent, std::ostream& out);

}  // namespace mambascope::cli
