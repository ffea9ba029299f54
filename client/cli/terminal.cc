#include "client/cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace mambascope::cli {
namespace {

constexpr int kNarrowest = 40, kWidest = 400;

struct Decoded {
  int32_t code_point;  // -1: the byte begins no character
  size_t bytes;
};

// The first character of a text that is not empty; strict, so overlong forms are no characters.
Decoded DecodeUtf8(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return {first, 1};
  const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < bytes) return {-1, 1};
  int32_t code_point = first & (0x7f >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {-1, 1};
    code_point = code_point << 6 | (byte(i) & 0x3f);
  }
  constexpr int32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code_point >= 0xd800 && code_point <= 0xdfff;
  if (code_point < kSmallest[bytes] || code_point > 0x10ffff || surrogate) return {-1, 1};
  return {code_point, bytes};
}

struct Span {
  int32_t first, last;
};

template <size_t N>
bool Within(const Span (&spans)[N], int32_t code_point) {
  return std::any_of(std::begin(spans), std::end(spans), [&](const Span& span) {
    return span.first <= code_point && code_point <= span.last;
  });
}

// Acts on the terminal or on the order of the text, or shows nothing at all. The joiners U+200C and
// U+200D stay: Indic and Persian text and emoji need them.
bool Harmful(int32_t code_point) {
  static constexpr Span kSpans[] = {
      {0x00, 0x1f},     {0x7f, 0x9f},     {0xad, 0xad},       {0x61c, 0x61c},     {0x180e, 0x180e},
      {0x200b, 0x200b}, {0x200e, 0x200f}, {0x2028, 0x202e},   {0x2060, 0x206f},   {0xfeff, 0xfeff},
      {0xfff9, 0xfffb}, {0xe000, 0xf8ff}, {0xe0000, 0xe0fff}, {0xf0000, 0x10ffff}};
  return Within(kSpans, code_point);
}

int Width(int32_t code_point) {
  static constexpr Span kCombining[] = {
      {0x300, 0x36f},   {0x483, 0x489},   {0x591, 0x5bd},   {0x610, 0x61a},   {0x64b, 0x65f},
      {0x93c, 0x93c},   {0x941, 0x948},   {0x94d, 0x94d},   {0xe31, 0xe31},   {0xe34, 0xe3a},
      {0xe47, 0xe4e},   {0x1ab0, 0x1aff}, {0x1dc0, 0x1dff}, {0x200c, 0x200d}, {0x20d0, 0x20ff},
      {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f}};
  static constexpr Span kWide[] = {{0x1100, 0x115f},   {0x2e80, 0x303e},   {0x3041, 0xa4cf},
                                   {0xac00, 0xd7a3},   {0xf900, 0xfaff},   {0xfe30, 0xfe4f},
                                   {0xff00, 0xff60},   {0xffe0, 0xffe6},   {0x1f300, 0x1f64f},
                                   {0x1f680, 0x1f6ff}, {0x1f900, 0x1f9ff}, {0x20000, 0x3fffd}};
  if (Within(kCombining, code_point)) return 0;
  return Within(kWide, code_point) ? 2 : 1;
}

}  // namespace

Screen ChooseScreen(ColorMode mode, bool is_terminal, int columns,
                    const std::function<const char*(const char*)>& getenv) {
  const auto value = [&](const char* name) {
    const char* text = getenv(name);
    return absl::string_view(text == nullptr ? "" : text);
  };
  Screen screen;
  screen.color =
      mode == ColorMode::kAlways || (mode == ColorMode::kAuto && is_terminal &&
                                     value("NO_COLOR").empty() && value("TERM") != "dumb");
  screen.truecolor = value("COLORTERM") == "truecolor" || value("COLORTERM") == "24bit";
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    if (value(name).empty()) continue;
    const std::string locale = absl::AsciiStrToLower(value(name));
    screen.utf8 = absl::StrContains(locale, "utf-8") || absl::StrContains(locale, "utf8");
    break;
  }
  if (columns > 0) screen.width = std::clamp(columns, kNarrowest, kWidest);
  return screen;
}

bool IsTerminal(int file_descriptor) { return isatty(file_descriptor) == 1; }

Screen ScreenOf(int file_descriptor, ColorMode mode) {
  winsize size = {};
  const bool known = ioctl(file_descriptor, TIOCGWINSZ, &size) == 0;
  return ChooseScreen(mode, IsTerminal(file_descriptor), known ? size.ws_col : 0,
                      [](const char* name) -> const char* { return std::getenv(name); });
}

std::string Escaped(absl::string_view text, bool utf8, Spaces spaces) {
  std::string escaped;
  escaped.reserve(text.size());
  while (!text.empty()) {
    const Decoded next = DecodeUtf8(text);
    const absl::string_view bytes = text.substr(0, next.bytes);
    text.remove_prefix(next.bytes);
    if (next.code_point == '\n') {
      absl::StrAppend(&escaped, "\\n");
    } else if (next.code_point == '\r') {
      absl::StrAppend(&escaped, "\\r");
    } else if (next.code_point == '\t') {
      absl::StrAppend(&escaped, "\\t");
    } else if (next.code_point == ' ' && spaces == Spaces::kVisible) {
      absl::StrAppend(&escaped, utf8 ? "\u2423" : "_");
    } else if (next.code_point < 0) {
      absl::StrAppendFormat(&escaped, "\\x%02x", static_cast<uint8_t>(bytes[0]));
    } else if (next.code_point < 0x80 && Harmful(next.code_point)) {
      absl::StrAppendFormat(&escaped, "\\x%02x", next.code_point);
    } else if (Harmful(next.code_point) || (!utf8 && next.code_point >= 0x80)) {
      absl::StrAppendFormat(&escaped, "\\u{%x}", next.code_point);
    } else {
      absl::StrAppend(&escaped, bytes);
    }
  }
  return escaped;
}

int DisplayWidth(absl::string_view escaped) {
  int width = 0;
  while (!escaped.empty()) {
    const Decoded next = DecodeUtf8(escaped);
    width += Width(next.code_point);
    escaped.remove_prefix(next.bytes);
  }
  return width;
}

std::string Fitted(absl::string_view escaped, int width) {
  std::string fitted;
  int used = 0;
  while (!escaped.empty()) {
    const Decoded next = DecodeUtf8(escaped);
    const int columns = Width(next.code_point);
    if (used + columns > width) break;
    absl::StrAppend(&fitted, escaped.substr(0, next.bytes));
    used += columns;
    escaped.remove_prefix(next.bytes);
  }
  fitted.append(std::max(0, width - used), ' ');
  return fitted;
}

void StatusLine::Show(absl::string_view text) {
  if (out_ == nullptr) return;
  const std::string escaped = Escaped(text, screen_.utf8);
  const int width = std::min(DisplayWidth(escaped), screen_.width - 1);
  *out_ << "\r\x1b[K" << Fitted(escaped, width) << std::flush;
  shown_ = true;
}

void StatusLine::Clear() {
  if (!shown_) return;
  *out_ << "\r\x1b[K" << std::flush;
  shown_ = false;
}

}  // namespace mambascope::cli
