#include "client/cli/render_agreement.h"

#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cli/heat_scale.h"
#include "client/cli/table.h"

namespace mambascope::cli {

void RenderAgreements(const Screen& screen,
                      const google::protobuf::RepeatedPtrField<v1::Agreement>& agreements,
                      std::ostream& out) {
  if (agreements.empty()) return;
  out << "\n" << Bold(screen) << "agreement" << Reset(screen) << "\n";
  std::vector<TableRow> rows = {{"", "", "Spearman", "Kendall", "best tokens in common"}};
  // A coefficient that is absent is not defined: a vector is constant.
  const auto cell = [](bool defined, double value) {
    return defined ? absl::StrFormat("%+.3f", value) : std::string("-");
  };
  for (const v1::Agreement& pair : agreements) {
    std::string common = "-";
    if (pair.has_top_overlap()) {
      common = absl::StrFormat("%.0f of %d", pair.top_overlap() * pair.top(), pair.top());
    }
    rows.push_back({Escaped(pair.first_id(), screen.utf8), Escaped(pair.second_id(), screen.utf8),
                    cell(pair.has_spearman(), pair.spearman()),
                    cell(pair.has_kendall(), pair.kendall()), std::move(common)});
  }
  PrintTable(rows, 2, out);
}

}  // namespace mambascope::cli
