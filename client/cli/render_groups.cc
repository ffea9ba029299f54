#include "client/cli/render_groups.h"

#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/heat_scale.h"

namespace mambascope::cli {
namespace {

std::string TextOf(const v1::GroupedScores::Group& group, absl::string_view prompt,
                   std::span<const TokenLabel> tokens) {
  if (group.begin_byte() < group.end_byte() && group.end_byte() <= prompt.size()) {
    return std::string(prompt.substr(group.begin_byte(), group.end_byte() - group.begin_byte()));
  }
  std::string text;
  for (int64_t i = group.begin_token(); i < group.end_token(); ++i) {
    if (i >= 0 && i < static_cast<int64_t>(tokens.size())) text += tokens[i].text;
  }
  return text;
}

}  // namespace

void RenderGroups(const Screen& screen, const v1::GroupedScores& scores, absl::string_view prompt,
                  std::span<const TokenLabel> tokens, std::ostream& out) {
  out << "  " << Dim(screen) << Escaped(scores.kind(), screen.utf8) << Reset(screen) << "\n";
  std::vector<TokenLabel> labels;
  std::vector<float> values;
  for (const v1::GroupedScores::Group& group : scores.groups()) {
    labels.push_back({TextOf(group, prompt, tokens), group.special(), group.begin_token()});
    values.push_back(static_cast<float>(group.score()));
  }
  if (!values.empty()) RenderRow(screen, labels, values, out);
  if (scores.kind() == "spans") {
    out << "  the rest " << Number(static_cast<float>(scores.rest())) << "\n";
  }
}

}  // namespace mambascope::cli
