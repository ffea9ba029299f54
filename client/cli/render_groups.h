#pragma once

#include <ostream>
#include <span>

#include "absl/strings/string_view.h"
#include "client/cli/render_text.h"
#include "client/cli/terminal.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// The groups as RenderRow shows tokens: their part of `prompt`, or the tokens they hold where they
// have none.
void RenderGroups(const Screen& screen, const v1::GroupedScores& scores, absl::string_view prompt,
                  std::span<const TokenLabel> tokens, std::ostream& out);

}  // namespace mambascope::cli
