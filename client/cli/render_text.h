#pragma once

#include <cstdint>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/cli/terminal.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "mambascope/v1/prediction.pb.h"

namespace mambascope::cli {

// A token as a person reads it. Not escaped: what prints it escapes it.
struct TokenLabel {
  std::string text;
  bool special = false;
  int64_t position = 0;  // in the input
};

// Of the input's tokens: their part of `prompt` where they have a span of it, else their piece,
// else
// "#" and their id. Of tokens that share a character the first shows it, the others show "~".
std::vector<TokenLabel> LabelTokens(const google::protobuf::RepeatedPtrField<v1::Token>& tokens,
                                    absl::string_view prompt);

// A vocabulary's spelling made readable: its marks for a space become spaces; "#id" if it is empty.
std::string ReadablePiece(absl::string_view piece, int32_t id);

// The tokens one after the other with bars between them; a long input shows its ends only.
void RenderTokens(const Screen& screen, std::span<const TokenLabel> tokens, int indent,
                  std::ostream& out);

// One value for each token (the sizes agree). With colour: the text itself with the values as its
// background, a legend, and the five largest by size with their numbers. Without: a table of
// position, token, score and bar, of a long input only the largest.
void RenderRow(const Screen& screen, std::span<const TokenLabel> tokens,
               std::span<const float> values, std::ostream& out);

}  // namespace mambascope::cli
