#include "client/cli/terminal.h"

#include <map>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

namespace mambascope::cli {
namespace {

using Environment = std::map<std::string, std::string>;

Screen Chosen(ColorMode mode, bool is_terminal, const Environment& environment, int columns = 0) {
  return ChooseScreen(mode, is_terminal, columns, [&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

TEST(ChooseScreen, ColoursOnlyTerminalsThatDoNotObject) {
  EXPECT_TRUE(Chosen(ColorMode::kAuto, true, {}).color);
  EXPECT_FALSE(Chosen(ColorMode::kAuto, false, {}).color);
  EXPECT_FALSE(Chosen(ColorMode::kAuto, true, {{"NO_COLOR", "1"}}).color);
  EXPECT_TRUE(Chosen(ColorMode::kAuto, true, {{"NO_COLOR", ""}}).color);
  EXPECT_FALSE(Chosen(ColorMode::kAuto, true, {{"TERM", "dumb"}}).color);
}

TEST(ChooseScreen, AnExplicitModeWins) {
  EXPECT_TRUE(Chosen(ColorMode::kAlways, false, {{"NO_COLOR", "1"}}).color);
  EXPECT_FALSE(Chosen(ColorMode::kNever, true, {}).color);
}

TEST(ChooseScreen, SpeaksUtf8UnlessTheLocaleDoesNot) {
  EXPECT_TRUE(Chosen(ColorMode::kAuto, true, {}).utf8);
  EXPECT_TRUE(Chosen(ColorMode::kAuto, true, {{"LANG", "de_DE.UTF-8"}}).utf8);
  EXPECT_FALSE(Chosen(ColorMode::kAuto, true, {{"LANG", "de_DE.ISO-8859-1"}}).utf8);
  EXPECT_FALSE(Chosen(ColorMode::kAuto, true, {{"LC_ALL", "C"}, {"LANG", "C.utf8"}}).utf8);
}

TEST(ChooseScreen, KeepsTheWidthWithinReason) {
  EXPECT_EQ(Chosen(ColorMode::kAuto, true, {}).width, 80);
  EXPECT_EQ(Chosen(ColorMode::kAuto, true, {}, 132).width, 132);
  EXPECT_EQ(Chosen(ColorMode::kAuto, true, {}, 3).width, 40);
}

TEST(Escaped, LeavesNoControlCharacterToTheTerminal) {
  std::string all;
  for (int c = 0; c < 256; ++c) all += static_cast<char>(c);
  all += "\u0080\u009b\u202e\u2066\u200f\ufeff\u2028\U000e0041";  // C1, bidirectional, invisible
  for (const bool utf8 : {true, false}) {
    for (const char c : Escaped(all, utf8)) {
      EXPECT_GE(static_cast<unsigned char>(c), 0x20);
      EXPECT_LT(static_cast<unsigned char>(c), 0x7f);
    }
  }
}

TEST(Escaped, WritesControlsAsTheirEscapes) {
  EXPECT_EQ(Escaped("a\nb\tc\r", true), "a\\nb\\tc\\r");
  EXPECT_EQ(Escaped("\x1b[31mred\x07", true), "\\x1b[31mred\\x07");
  EXPECT_EQ(Escaped("\u009b31m", true), "\\u{9b}31m");
  EXPECT_EQ(Escaped("\u202eevil", true), "\\u{202e}evil");
}

TEST(Escaped, KeepsTextOfAllScripts) {
  const std::string text = "Gr\u00fc\u00dfe \u4e16\u754c \u0928\u094d\u200d\u092f \U0001f600";
  EXPECT_EQ(Escaped(text, true), text);
  EXPECT_EQ(Escaped("\u00fc", false), "\\u{fc}");
}

TEST(Escaped, ShowsBytesThatAreNoCharacters) {
  EXPECT_EQ(Escaped("\xff", true), "\\xff");
  EXPECT_EQ(Escaped("\xe2\x82", true), "\\xe2\\x82");           // cut off
  EXPECT_EQ(Escaped("\xc0\x9b", true), "\\xc0\\x9b");           // overlong
  EXPECT_EQ(Escaped("\xed\xa0\x80", true), "\\xed\\xa0\\x80");  // a surrogate
}

TEST(Escaped, MakesSpacesVisibleWhereAsked) {
  EXPECT_EQ(Escaped(" a", true, Spaces::kVisible), "\u2423a");
  EXPECT_EQ(Escaped(" a", false, Spaces::kVisible), "_a");
  EXPECT_EQ(Escaped(" a", true), " a");
}

TEST(DisplayWidth, CountsColumnsNotBytes) {
  EXPECT_EQ(DisplayWidth("abc"), 3);
  EXPECT_EQ(DisplayWidth("\u4e16\u754c"), 4);
  EXPECT_EQ(DisplayWidth("e\u0301"), 1);
  EXPECT_EQ(Fitted("\u4e16\u754c", 3), "\u4e16 ");
  EXPECT_EQ(Fitted("ab", 4), "ab  ");
}

TEST(StatusLine, WritesOverItselfAndLeavesNothing) {
  std::ostringstream out;
  {
    StatusLine line(&out, Screen{.width = 40});
    line.Show("one\x1b[2J");
    line.Show(std::string(100, 'x'));
  }
  EXPECT_EQ(out.str(), "\r\x1b[Kone\\x1b[2J\r\x1b[K" + std::string(39, 'x') + "\r\x1b[K");
}

}  // namespace
}  // namespace mambascope::cli
