#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/tokenizer.h"

namespace mambascope::model {

// The text of a generation, token by token. All that Push and the final Flush returned, joined, is
// Decode of all ids with skip_special_tokens. Each part is valid UTF-8; sent text never changes.
//
// A character that is not complete yet is held back (at most 3 bytes of it) until the token that
// completes it arrives, or until Flush shows it as U+FFFD.
//
// The one exception: for byte tokens that do not form UTF-8, a decoder with byte fallback replaces
// their whole run, good characters too. The stream replaces only what it has not sent.
//
// Cost: a Decode of at most 32 ids per token, now and then a second, however long the text is.
// Threads: one at a time. The tokenizer is borrowed and must outlive the stream.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // The text that `id` adds, often empty. On an error (see Tokenizer::Decode) the stream is as
  // before, so a caller may skip the id and go on.
  absl::StatusOr<std::string> Push(int32_t id);

  // What was held back. The stream then starts anew.
  std::string Flush();

 private:
  // Forgets the tokens before `cut` and returns the text of the others.
  absl::StatusOr<std::string> StartWindowAt(size_t cut);

  const Tokenizer& tokenizer_;
  // The last tokens without special ones, from which the next text is decoded. The first of them is
  // old and only gives context: some decoders treat the start of a text differently.
  std::vector<int32_t> window_;
  std::string sent_;     // the window's text up to here
  std::string held_;     // the rest of it
  size_t next_cut_ = 0;  // the tokens from here on are pending: the one before ended a character
  size_t cut_ = 0;       // the place before it where a character ended: one more step of context
};

}  // namespace mambascope::model
