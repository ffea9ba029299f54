#include "server/model/text_stream.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "server/base/status.h"

namespace mambascope::model {
namespace {

// Decoding this many ids costs little next to a model's step, and shortening costs a second decode,
// so it is done rarely.
constexpr size_t kMaxWindow = 32;

// Kept when no clean cut exists, which only bytes that are not UTF-8 bring about. An incomplete
// character has at most 3 tokens, so the text's end reads the same from here.
constexpr size_t kForcedWindow = 8;

constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// The end of `text` that the next token may still change: an incomplete character shows as one U+FFFD,
// or, with byte fallback, as one for each of its bytes, of which there are at most 3.
size_t UnsettledBytes(absl::string_view text) {
  size_t bytes = 0;
  while (bytes < 3 * kReplacement.size() &&
         absl::EndsWith(text.substr(0, text.size() - bytes), kReplacement)) {
    bytes += kReplacement.size();
  }
  return bytes;
}

bool InsideCharacter(absl::string_view text, size_t byte) {
  return byte < text.size() && (static_cast<unsigned char>(text[byte]) & 0xC0) == 0x80;
}

}  // namespace

absl::StatusOr<std::string> TextStream::Push(int32_t id) {
  // They add no text, and leaving them out here is what Decode does before it joins the others.
  if (tokenizer_.IsSpecial(id)) return std::string();

  window_.push_back(id);
  absl::StatusOr<std::string> text = tokenizer_.Decode(window_, /*skip_special_tokens=*/true);
  if (!text.ok()) {
    window_.pop_back();
    return text.status();
  }
  // A decoder may have rewritten sent text (byte fallback): stay on whole characters.
  const size_t settled = text->size() - UnsettledBytes(*text);
  while (InsideCharacter(*text, sent_bytes_)) ++sent_bytes_;

  std::string added;
  if (settled > sent_bytes_) {
    added = text->substr(sent_bytes_, settled - sent_bytes_);
    sent_bytes_ = settled;
  }
  held_ = text->size() > sent_bytes_ ? text->substr(sent_bytes_) : std::string();
  if (held_.empty()) {
    cut_ = next_cut_;
    next_cut_ = window_.size();
  }
  if (window_.size() >= kMaxWindow) {
    RETURN_IF_ERROR(Shorten());
  }
  return added;
}

absl::Status TextStream::Shorten() {
  const size_t cut = cut_ > 0 ? cut_ : window_.size() - kForcedWindow;
  const std::vector<int32_t> rest(window_.begin() + static_cast<ptrdiff_t>(cut), window_.end());
  ASSIGN_OR_RETURN(const std::string text, tokenizer_.Decode(rest, /*skip_special_tokens=*/true));
  window_ = rest;
  sent_bytes_ = text.size() > held_.size() ? text.size() - held_.size() : 0;
  cut_ = 0;
  next_cut_ = next_cut_ > cut ? next_cut_ - cut : 0;
  return absl::OkStatus();
}

std::string TextStream::Flush() {
  std::string rest = std::move(held_);
  window_.clear();
  held_.clear();
  sent_bytes_ = cut_ = next_cut_ = 0;
  return rest;
}

}  // namespace mambascope::model
