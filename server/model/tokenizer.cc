#include "server/model/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/status.h"

#ifndef MAMBASCOPE_TOKENIZER
#define MAMBASCOPE_TOKENIZER 1
#endif

#if MAMBASCOPE_TOKENIZER
#include "server/model/tokenizer/tokenizer_ffi.h"
#endif

namespace mambascope::model {

#if MAMBASCOPE_TOKENIZER

namespace {

// Bounds what a wrong path can make the server read.
constexpr uintmax_t kMaxFileBytes = uintmax_t{256} << 20;

std::string TakeText(MambascopeText text) {
  std::string taken(reinterpret_cast<const char*>(text.data), text.size);
  mambascope_text_free(text);
  return taken;
}

const uint8_t* Bytes(absl::string_view text) {
  return reinterpret_cast<const uint8_t*>(text.data());
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code error;
  // A folder, a pipe or a device would block or never end.
  if (!std::filesystem::is_regular_file(path, error)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", error ? error.message() : "not a regular file"));
  }
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error) return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.message()));
  if (size > kMaxFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", size, " bytes exceed the limit ", kMaxFileBytes));
  }
  std::string contents(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(contents.data(), static_cast<std::streamsize>(size))) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be read"));
  }
  return contents;
}

bool InsideCharacter(absl::string_view text, size_t byte) {
  return byte < text.size() && (static_cast<uint8_t>(text[byte]) & 0xC0) == 0x80;
}

// Makes the promises of Token's span true for whatever the library reported, so that nobody who
// slices a prompt by them has to check.
void PlaceSpans(absl::string_view text, const MambascopeEncoding& encoding,
                std::vector<Token>* tokens) {
  std::vector<Token*> placed;  // without the template's
  placed.reserve(tokens->size());
  // A combining mark that the normaliser composed with its letter is in no reported span. It goes
  // to the token before, and to all that share that token's last character.
  const auto cover_up_to = [&placed](uint32_t byte) {
    if (placed.empty() || placed.back()->end_byte >= byte) return;
    const uint32_t covered = placed.back()->end_byte;
    const bool may_share = placed.back()->begin_byte < covered;
    for (auto token = placed.rbegin(); token != placed.rend(); ++token) {
      if ((*token)->end_byte != covered) break;
      (*token)->end_byte = byte;
      if (!may_share) break;
    }
  };
  for (size_t i = 0; i < tokens->size(); ++i) {
    const MambascopeEncodedToken& encoded = encoding.tokens[i];
    if (encoded.added) continue;
    Token& token = (*tokens)[i];
    uint32_t begin = encoded.begin;
    uint32_t end = encoded.end;
    while (InsideCharacter(text, begin)) --begin;
    while (InsideCharacter(text, end)) ++end;
    cover_up_to(begin);
    token.begin_byte = placed.empty() ? 0 : std::max(begin, placed.back()->begin_byte);
    token.end_byte =
        std::max({end, token.begin_byte, placed.empty() ? 0 : placed.back()->end_byte});
    placed.push_back(&token);
  }
  cover_up_to(static_cast<uint32_t>(text.size()));

  uint32_t at = 0;
  for (size_t i = 0; i < tokens->size(); ++i) {
    Token& token = (*tokens)[i];
    if (encoding.tokens[i].added) token.begin_byte = token.end_byte = at;
    at = token.end_byte;
  }
  // Spans overlap only where tokens share a character.
  for (size_t i = 1; i < placed.size(); ++i) {
    if (placed[i]->begin_byte < placed[i - 1]->end_byte) {
      placed[i]->partial = placed[i - 1]->partial = true;
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<const Tokenizer>> Tokenizer::Load(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string json, ReadFile(path));

  MambascopeText error{};
  MambascopeTokenizer* const handle = mambascope_tokenizer_load(Bytes(json), json.size(), &error);
  if (handle == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", TakeText(error)));
  }
  std::unique_ptr<Tokenizer> tokenizer(new Tokenizer(handle));
  const uint32_t size = mambascope_tokenizer_vocabulary_size(handle);
  tokenizer->pieces_.reserve(size);
  tokenizer->special_.reserve(size);
  for (uint32_t id = 0; id < size; ++id) {
    MambascopeText piece{};
    bool special = false;
    if (!mambascope_tokenizer_piece(handle, id, &piece, &special, &error)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": token ", id, ": ", TakeText(error)));
    }
    tokenizer->pieces_.push_back(TakeText(piece));
    tokenizer->special_.push_back(special);
  }
  return tokenizer;
}

Tokenizer::~Tokenizer() { mambascope_tokenizer_free(handle_); }

absl::StatusOr<std::vector<Token>> Tokenizer::Encode(absl::string_view text,
                                                     bool add_special_tokens) const {
  MambascopeText error{};
  MambascopeEncoding encoding{};
  if (!mambascope_tokenizer_encode(handle_, Bytes(text), text.size(), add_special_tokens, &encoding,
                                   &error)) {
    return absl::InvalidArgumentError(TakeText(error));
  }
  const std::unique_ptr<MambascopeEncoding, void (*)(MambascopeEncoding*)> release(
      &encoding, [](MambascopeEncoding* e) { mambascope_encoding_free(*e); });

  std::vector<Token> tokens(encoding.size);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const MambascopeEncodedToken& encoded = encoding.tokens[i];
    Token& token = tokens[i];
    token.id = static_cast<int32_t>(encoded.id);
    token.piece = Piece(token.id);
    token.special = encoded.added || IsSpecial(token.id);
  }
  PlaceSpans(text, encoding, &tokens);
  return tokens;
}

absl::StatusOr<std::string> Tokenizer::Decode(std::span<const int32_t> ids,
                                              bool skip_special_tokens) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocabulary_size()) {
      return absl::InvalidArgumentError(absl::StrCat("ids[", i, "]: ", ids[i], " is not in [0, ",
                                                     vocabulary_size(), "), the vocabulary"));
    }
  }
  MambascopeText error{};
  MambascopeText text{};
  if (!mambascope_tokenizer_decode(handle_, reinterpret_cast<const uint32_t*>(ids.data()),
                                   ids.size(), skip_special_tokens, &text, &error)) {
    return absl::InvalidArgumentError(TakeText(error));
  }
  return TakeText(text);
}

#else  // MAMBASCOPE_TOKENIZER

namespace {
absl::Status Absent() { return absl::UnimplementedError("built without the tokenizer"); }
}  // namespace

absl::StatusOr<std::unique_ptr<const Tokenizer>> Tokenizer::Load(const std::string&) {
  return Absent();
}

Tokenizer::~Tokenizer() { static_cast<void>(handle_); }

absl::StatusOr<std::vector<Token>> Tokenizer::Encode(absl::string_view, bool) const {
  return Absent();
}

absl::StatusOr<std::string> Tokenizer::Decode(std::span<const int32_t>, bool) const {
  return Absent();
}

#endif  // MAMBASCOPE_TOKENIZER

std::string Tokenizer::Piece(int32_t id) const {
  return id >= 0 && id < vocabulary_size() ? pieces_[id] : std::string();
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return id >= 0 && id < vocabulary_size() && special_[id];
}

}  // namespace mambascope::model
