#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

struct MambascopeTokenizer;  // the C interface's handle, server/model/tokenizer/tokenizer_ffi.h

namespace mambascope::model {

// One token of a prompt, and the part of the prompt it stands for.
struct Token {
  int32_t id = 0;     // in [0, vocabulary_size())
  std::string piece;  // as the vocabulary spells it (" Paris" is "ĠParis" there); valid UTF-8

  // Half-open, in bytes of the UTF-8 prompt as it was given, whatever the tokenizer normalises.
  //   - Never inside a character. Tokens that share a character each have the whole character.
  //   - Neither begin nor end decreases from one token to the next.
  //   - Together they cover the prompt, unless all of it is dropped. A token that begins with a
  //     space has the space: trim_offsets in tokenizer.json is ignored. Text that the tokenizer
  //     composes away or drops goes to the token before it, or to the first.
  //   - Empty for a token that the template added, and placed where that token stands.
  uint32_t begin_byte = 0;
  uint32_t end_byte = 0;

  bool special = false;  // added by the template, or special in the vocabulary, even if spelled out
  bool partial = false;  // shares a character with a neighbour, so its bytes alone may not be text
};

// The tokenizer.json of one model. Gives the ids that the Hugging Face tokenizers library gives,
// except that truncation and padding in the file are ignored: the caller's prompt is never cut.
//
// Text that spells a special token, such as "<|endoftext|>", becomes that token, as it does there.
//
// Threads: all methods may run on many threads at once.
// Errors: kInvalidArgument names what is wrong with the file, the text or the ids. No input aborts.
class Tokenizer {
 public:
  // Reads the file at `path` (up to 256 MiB); nothing is kept open. The error names `path` and what
  // is wrong. kUnimplemented in a build without the tokenizer.
  static absl::StatusOr<std::unique_ptr<const Tokenizer>> Load(const std::string& path);

  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;
  ~Tokenizer();

  // `text` must be valid UTF-8; it may hold NUL bytes. `add_special_tokens` lets the file's
  // template add its own (often one at the start). Memory is up to 250 bytes for each byte of the
  // text, and a megabyte takes half a second: bound the size before calling.
  absl::StatusOr<std::vector<Token>> Encode(absl::string_view text,
                                            bool add_special_tokens = true) const;

  // As the vocabulary spells it. Empty if no token has this id.
  std::string Piece(int32_t id) const;

  // False for an id that no token has.
  bool IsSpecial(int32_t id) const;

  // Bytes that are not UTF-8 come out as U+FFFD. The error names the first id outside
  // [0, vocabulary_size()) and that size. For text that grows token by token see TextStream.
  absl::StatusOr<std::string> Decode(std::span<const int32_t> ids, bool skip_special_tokens) const;

  // One past the largest id, added tokens included. A model's embedding may be larger (padded): its
  // ids from here on have no text.
  int32_t vocabulary_size() const { return static_cast<int32_t>(pieces_.size()); }

 private:
  explicit Tokenizer(MambascopeTokenizer* handle) : handle_(handle) {}

  MambascopeTokenizer* const handle_;  // owned
  // Copied at load: explanations ask for pieces token by token, and a lookup needs no library call.
  std::vector<std::string> pieces_;
  std::vector<bool> special_;
};

}  // namespace mambascope::model
