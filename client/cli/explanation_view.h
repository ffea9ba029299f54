#pragma once

#include <cstddef>
#include <ostream>
#include <span>

#include "client/cli/answer.h"
#include "client/cli/render_lens.h"
#include "client/cli/render_text.h"
#include "client/cli/terminal.h"
#include "mambascope/v1/prediction.pb.h"

namespace mambascope::cli {

// What an explanation is shown beside; borrowed.
struct ExplanationContext {
  const v1::PredictRequest& request;
  std::span<const TokenLabel> tokens;  // of the prompt, then those generated
  size_t prompt_tokens = 0;            // how many of them are the prompt's
  const PieceNames& pieces;
  bool classes = false;  // of a classifier
};

// A finished explanation for a person: what is explained, the scores or maps, how far they can be
// trusted. Everything that came from elsewhere is escaped.
void RenderExplanation(const Screen& screen, const ExplanationAnswer& explanation,
                       const ExplanationContext& context, std::ostream& out);

}  // namespace mambascope::cli
