#include "server/model/text_stream.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "server/base/status.h"

namespace mambascope::model {
namespace {

// Decoding this many ids costs microseconds, and shortening costs a second decode, so it is rare.
constexpr size_t kMaxWindow = 32;

// Kept when a window holds no place to cut, which only bytes that are not UTF-8 bring about. An
// incomplete character has at most 3 tokens, so the text's end reads the same from here.
constexpr size_t kForcedWindow = 8;

constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// The end of `text` that the next token may still change: an incomplete character shows as one
// U+FFFD, or, with byte fallback, as one for each of its bytes, of which there are at most 3.
size_t UnsettledBytes(absl::string_view text) {
  size_t bytes = 0;
  while (bytes < 3 * kReplacement.size() &&
         absl::EndsWith(text.substr(0, text.size() - bytes), kReplacement)) {
    bytes += kReplacement.size();
  }
  return bytes;
}

}  // namespace

absl::StatusOr<std::string> TextStream::Push(int32_t id) {
  // They add no text, and leaving them out here is what Decode does before it joins the others.
  if (tokenizer_.IsSpecial(id)) return std::string();

  window_.push_back(id);
  absl::StatusOr<std::string> text = tokenizer_.Decode(window_, /*skip_special_tokens=*/true);
  if (text.ok() && !absl::StartsWith(*text, sent_)) {
    // Byte fallback rewrites a whole run while a character in it is incomplete. Go on from the
    // pending tokens, whose text does not depend on what was sent.
    text = StartWindowAt(next_cut_);
    sent_.clear();
  }
  if (!text.ok()) {
    window_.pop_back();
    return text.status();
  }

  const size_t settled = std::max(text->size() - UnsettledBytes(*text), sent_.size());
  std::string added = text->substr(sent_.size(), settled - sent_.size());
  sent_ += added;
  held_ = text->substr(settled);
  if (held_.empty()) {
    cut_ = next_cut_;
    next_cut_ = window_.size();
  }
  if (window_.size() >= kMaxWindow) {
    ASSIGN_OR_RETURN(sent_, StartWindowAt(cut_ > 0 ? cut_ : window_.size() - kForcedWindow));
    sent_ = std::string(absl::StripSuffix(sent_, held_));
  }
  return added;
}

absl::StatusOr<std::string> TextStream::StartWindowAt(size_t cut) {
  window_.erase(window_.begin(), window_.begin() + static_cast<ptrdiff_t>(cut));
  next_cut_ = next_cut_ > cut ? next_cut_ - cut : 0;
  cut_ = 0;
  return tokenizer_.Decode(window_, /*skip_special_tokens=*/true);
}

std::string TextStream::Flush() {
  std::string rest = std::move(held_);
  window_.clear();
  sent_.clear();
  held_.clear();
  cut_ = next_cut_ = 0;
  return rest;
}

}  // namespace mambascope::model
