#include "server/explain/text_segments.h"

#include <algorithm>
#include <array>
#include <utility>

namespace mambascope::explain {
namespace {

using Range = std::pair<char32_t, char32_t>;  // inclusive

constexpr std::array<Range, 10> kSpaces = {{{0x09, 0x0d},
                                            {0x20, 0x20},
                                            {0x85, 0x85},
                                            {0xa0, 0xa0},
                                            {0x1680, 0x1680},
                                            {0x2000, 0x200a},
                                            {0x2028, 0x2029},
                                            {0x202f, 0x202f},
                                            {0x205f, 0x205f},
                                            {0x3000, 0x3000}}};
// Of the scripts most written; the rest counts as letters.
constexpr std::array<Range, 36> kPunctuation = {
    {{'!', '/'},       {':', '@'},       {'[', '^'},       {'`', '`'},       {'{', '~'},
     {0xa1, 0xa1},     {0xa7, 0xa7},     {0xab, 0xab},     {0xb6, 0xb7},     {0xbb, 0xbb},
     {0xbf, 0xbf},     {0x37e, 0x37e},   {0x387, 0x387},   {0x55a, 0x55f},   {0x589, 0x58a},
     {0x5be, 0x5be},   {0x5f3, 0x5f4},   {0x60c, 0x60d},   {0x61b, 0x61b},   {0x61e, 0x61f},
     {0x66a, 0x66d},   {0x6d4, 0x6d4},   {0x964, 0x965},   {0xe5a, 0xe5b},   {0x2010, 0x2027},
     {0x2030, 0x205e}, {0x2e00, 0x2e5d}, {0x3001, 0x3003}, {0x3008, 0x3011}, {0x3014, 0x301f},
     {0xfe10, 0xfe19}, {0xfe30, 0xfe6b}, {0xff01, 0xff0f}, {0xff1a, 0xff20}, {0xff3b, 0xff40},
     {0xff5b, 0xff65}}};

template <size_t N>
bool In(char32_t c, const std::array<Range, N>& ascending) {
  const auto range =
      std::lower_bound(ascending.begin(), ascending.end(), c,
                       [](const Range& r, char32_t code) { return r.second < code; });
  return range != ascending.end() && c >= range->first;
}

bool IsSpace(char32_t c) { return In(c, kSpaces); }
bool IsLineBreak(char32_t c) {
  return c == '\n' || c == '\r' || c == 0x85 || c == 0x2028 || c == 0x2029;
}
bool IsDigit(char32_t c) { return c >= '0' && c <= '9'; }

bool IsWideEnder(char32_t c) { return c == 0x3002 || c == 0xff01 || c == 0xff1f || c == 0xff61; }
bool IsEnder(char32_t c) {
  return c == '.' || c == '!' || c == '?' || c == 0x2026 || IsWideEnder(c);
}
bool IsCloser(char32_t c) {
  constexpr char32_t kClosers[] = {')',    ']',    '}',    '"',    '\'',   0xbb,   0x2019,
                                   0x201d, 0x203a, 0x300b, 0x300d, 0x300f, 0x3011, 0xff09};
  return std::find(std::begin(kClosers), std::end(kClosers), c) != std::end(kClosers);
}

// One character of the text. Past the end: code 0, no bytes.
struct Character {
  char32_t code = 0;
  uint32_t begin = 0, end = 0;
};

// A byte that begins no character is one by itself, with its own value as the code.
Character At(absl::string_view text, uint32_t begin) {
  if (begin >= text.size()) return {0, begin, begin};
  const auto byte = [&](uint32_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(begin);
  const uint32_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 1;
  if (length == 1 || begin + length > text.size()) return {first, begin, begin + 1};
  char32_t code = first & (0x7f >> length);
  for (uint32_t i = 1; i < length; ++i) code = code << 6 | (byte(begin + i) & 0x3f);
  return {code, begin, begin + length};
}

enum class Kind { kSpace, kPunctuation, kWord };

Kind KindOf(char32_t c) {
  if (IsSpace(c)) return Kind::kSpace;
  return In(c, kPunctuation) ? Kind::kPunctuation : Kind::kWord;
}

// Whether a mark between these two characters is part of a word.
bool Joins(char32_t before, char32_t mark, const Character& after) {
  if (mark == '.' || mark == ',') return IsDigit(before) && IsDigit(after.code);
  if (mark != '\'' && mark != 0x2019) return false;
  return after.begin != after.end && KindOf(before) == Kind::kWord &&
         KindOf(after.code) == Kind::kWord;
}

// Past the whitespace that begins at `begin`; whether it holds a line break.
std::pair<uint32_t, bool> SkipSpaces(absl::string_view text, uint32_t begin) {
  bool breaks = false;
  Character c = At(text, begin);
  for (; c.begin != c.end && IsSpace(c.code); c = At(text, c.end)) breaks |= IsLineBreak(c.code);
  return {c.begin, breaks};
}

// Past the marks that begin at `begin`, an ender; whether a sentence ends there.
std::pair<uint32_t, bool> SkipEnders(absl::string_view text, uint32_t begin) {
  bool wide = false;
  Character c = At(text, begin);
  for (; c.begin != c.end && (IsEnder(c.code) || IsCloser(c.code)); c = At(text, c.end)) {
    wide |= IsWideEnder(c.code);
  }
  return {c.begin, wide || c.begin == c.end || IsSpace(c.code)};
}

}  // namespace

std::vector<uint32_t> WordStarts(absl::string_view text) {
  std::vector<uint32_t> starts;
  Character c = At(text, 0), previous;
  Kind before = Kind::kSpace;
  for (; c.begin != c.end; previous = c, c = At(text, c.end)) {
    Kind kind = KindOf(c.code);
    if (kind == Kind::kPunctuation && before == Kind::kWord &&
        Joins(previous.code, c.code, At(text, c.end))) {
      kind = Kind::kWord;
    }
    const bool changes = kind != before && before != Kind::kSpace;
    if (c.begin == 0 || changes) starts.push_back(c.begin);
    before = kind;
  }
  return starts;
}

std::vector<uint32_t> SentenceStarts(absl::string_view text) {
  std::vector<uint32_t> starts;
  if (text.empty()) return starts;
  starts.push_back(0);
  const auto start = [&](uint32_t at) {
    if (at > starts.back() && SkipSpaces(text, at).first < text.size()) starts.push_back(at);
  };
  for (uint32_t at = 0; at < text.size();) {
    const Character c = At(text, at);
    if (IsSpace(c.code)) {
      const auto [end, breaks] = SkipSpaces(text, at);
      if (breaks) start(at);
      at = end;
    } else if (IsEnder(c.code)) {
      const auto [end, ends] = SkipEnders(text, at);
      if (ends) start(end);
      at = end;
    } else {
      at = c.end;
    }
  }
  return starts;
}

}  // namespace mambascope::explain
