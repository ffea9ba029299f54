#pragma once

#include <functional>
#include <ostream>
#include <string>

#include "absl/strings/string_view.h"

namespace mambascope::cli {

enum class ColorMode { kAuto, kAlways, kNever };

// What the place that text goes to can show.
struct Screen {
  bool color = false;
  bool truecolor = false;  // else the 256 colours of xterm
  bool utf8 = true;
  int width = 80;  // columns
};

// `columns` is the terminal's width, 0 if unknown. Colour by default only on a terminal, without
// NO_COLOR and not on TERM=dumb. UTF-8 unless the locale names another encoding: containers often
// have no locale at all, and the terminals before them speak UTF-8.
Screen ChooseScreen(ColorMode mode, bool is_terminal, int columns,
                    const std::function<const char*(const char*)>& getenv);

// Of this process's standard output or error.
Screen ScreenOf(int file_descriptor, ColorMode mode);
bool IsTerminal(int file_descriptor);

enum class Spaces { kPlain, kVisible };

// Text from a model, a prompt or a server, made safe to print: control characters (C0, DEL, C1),
// what reorders or hides text (bidirectional controls, tags) and bytes that are no UTF-8 appear as
// \n, \x1b or \u{202e}. Without `utf8` everything beyond ASCII does: an 8-bit terminal would take
// the bytes 80 to 9f for controls. A backslash stays as it is: this is for the eye, --json is for
// programs.
std::string Escaped(absl::string_view text, bool utf8, Spaces spaces = Spaces::kPlain);

// Columns that an escaped text takes.
int DisplayWidth(absl::string_view escaped);

// `escaped` cut to at most `width` columns, then filled up to them with spaces.
std::string Fitted(absl::string_view escaped, int width);

// One line of a terminal that is written again and again, for progress.
class StatusLine {
 public:
  // nullptr: shows nothing. Borrowed.
  StatusLine(std::ostream* out, const Screen& screen) : out_(out), screen_(screen) {}
  ~StatusLine() { Clear(); }
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  void Show(absl::string_view text);
  // Before anything else is written to the same terminal.
  void Clear();

 private:
  std::ostream* out_;
  Screen screen_;
  bool shown_ = false;
};

}  // namespace mambascope::cli
