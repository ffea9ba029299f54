#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/tokenizer.h"

namespace mambascope::model {

// The text of a generation, token by token. All that Push and the final Flush returned, joined, is
// Decode of all ids with skip_special_tokens; each part is valid UTF-8, and sent text never changes.
//
// A character that is not complete yet is held back (at most 3 bytes of it) until the token that
// completes it arrives, or until Flush shows it as U+FFFD.
//
// The one exception: a decoder with byte fallback turns a whole run of byte tokens into U+FFFD when a
// later one makes the run invalid. Characters of such a run that were already sent stay sent.
//
// Cost: one Decode of at most 32 ids per token, however long the text is.
// Threads: one at a time. The tokenizer is borrowed and must outlive the stream.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // The text that `id` adds, often empty. On an error (see Tokenizer::Decode) the stream is as before,
  // so a caller may skip the id and go on.
  absl::StatusOr<std::string> Push(int32_t id);

  // What was held back. The stream then starts anew.
  std::string Flush();

 private:
  absl::Status Shorten();

  const Tokenizer& tokenizer_;
  // The last tokens without special ones, from which the next text is decoded. The first of them is
  // old and only gives context: some decoders treat the start of a text differently.
  std::vector<int32_t> window_;
  size_t sent_bytes_ = 0;  // of the window's text
  std::string held_;       // the rest of the window's text
  size_t cut_ = 0;         // the window may start here: no character crosses this place
  size_t next_cut_ = 0;    // likewise, but nothing sent stands behind it yet
};

}  // namespace mambascope::model
