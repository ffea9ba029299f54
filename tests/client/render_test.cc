#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/heat_scale.h"
#include "client/cli/render_map.h"
#include "client/cli/render_text.h"

namespace mambascope::cli {
namespace {

const Screen kPlain = {.color = false, .truecolor = false, .utf8 = true, .width = 80};
const Screen kColor = {.color = true, .truecolor = false, .utf8 = true, .width = 80};
const Screen kTrueColor = {.color = true, .truecolor = true, .utf8 = true, .width = 80};
const Screen kAscii = {.color = false, .truecolor = false, .utf8 = false, .width = 80};

std::vector<TokenLabel> Labels(const std::vector<std::string>& texts) {
  std::vector<TokenLabel> labels;
  for (const std::string& text : texts) {
    labels.push_back({text, false, static_cast<int64_t>(labels.size())});
  }
  return labels;
}

std::vector<TokenLabel> Words(int count) {
  std::vector<std::string> texts;
  for (int i = 0; i < count; ++i) texts.push_back(absl::StrCat(" w", i));
  return Labels(texts);
}

std::string RowText(const Screen& screen, const std::vector<TokenLabel>& tokens,
                    const std::vector<float>& values) {
  std::ostringstream out;
  RenderRow(screen, tokens, values, out);
  return out.str();
}

struct Axis {
  std::string name;
  int64_t size;
};

v1::TensorInfo Info(const std::vector<Axis>& axes) {
  v1::TensorInfo info;
  for (const Axis& axis : axes) {
    info.add_axes()->set_name(axis.name);
    info.mutable_axes()->rbegin()->set_size(axis.size);
  }
  return info;
}

std::string TensorText(const Screen& screen, const v1::TensorInfo& info,
                       const std::vector<float>& values, const std::vector<TokenLabel>& tokens,
                       int target) {
  std::ostringstream out;
  RenderTensor(screen, info, values, tokens, target, out);
  return out.str();
}

int Lines(const std::string& text) {
  return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
}

TEST(HeatScale, OneDominantEntryDoesNotStretchTheScale) {
  const HeatScale scale = FitScale(std::vector<float>{0.1f, 0.05f, 0.08f, 9.0f});
  EXPECT_FLOAT_EQ(scale.limit, 0.1f);
  EXPECT_EQ(scale.beyond, 1);
  EXPECT_FALSE(scale.is_signed);
  EXPECT_EQ(scale.Level(9), 1);
}

TEST(HeatScale, EntriesOfOneSizeSpanTheWholeScale) {
  const HeatScale scale = FitScale(std::vector<float>{0.1f, -0.15f, 0});
  EXPECT_FLOAT_EQ(scale.limit, 0.15f);
  EXPECT_EQ(scale.beyond, 0);
  EXPECT_TRUE(scale.is_signed);
  EXPECT_EQ(scale.Level(-0.15f), -1);
}

TEST(HeatScale, SurvivesWhatIsNoNumberAndNothingAtAll) {
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  const HeatScale scale = FitScale(std::vector<float>{nan, infinity, 1});
  EXPECT_EQ(scale.limit, 1);
  EXPECT_EQ(scale.not_numbers, 1);
  EXPECT_EQ(scale.beyond, 1);
  EXPECT_EQ(scale.Level(nan), 0);
  EXPECT_EQ(FitScale(std::vector<float>{0, 0}).Level(0), 0);
  EXPECT_EQ(FitScale({}).limit, 0);
}

TEST(HeatColor, IsBlueBelowWhiteAtAndRedAboveZero) {
  const HeatScale scale = {.is_signed = true, .limit = 1};
  for (const Screen& screen : {kColor, kTrueColor}) {
    EXPECT_GT(HeatColor(screen, scale, 1).red, HeatColor(screen, scale, 1).blue);
    EXPECT_LT(HeatColor(screen, scale, -1).red, HeatColor(screen, scale, -1).blue);
    EXPECT_EQ(HeatColor(screen, scale, 0).red, HeatColor(screen, scale, 0).blue);
  }
  EXPECT_EQ(Background(kColor, HeatColor(kColor, scale, 1)), "\x1b[48;5;124m");
  EXPECT_EQ(Background(kTrueColor, HeatColor(kTrueColor, scale, 1)), "\x1b[48;2;178;24;43m");
}

TEST(RenderRow, WithoutColourIsATableOfPlainText) {
  const std::string text = RowText(kPlain, Labels({"The", " cat"}), {0.25f, -0.5f});
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_TRUE(absl::StrContains(text, "0  The         +0.25  ")) << text;
  EXPECT_TRUE(absl::StrContains(text, "1  \u2423cat         -0.5  \u2591")) << text;
}

TEST(RenderRow, WithoutUtf8IsAscii) {
  for (const char c : RowText(kAscii, Labels({"\u00fc", " cat"}), {0.25f, -0.5f})) {
    EXPECT_LT(static_cast<unsigned char>(c), 0x80);
  }
}

TEST(RenderRow, WithColourShowsTheTextAndTheFiveLargest) {
  const std::string text =
      RowText(kColor, Words(8), {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f});
  EXPECT_TRUE(absl::StrContains(text, "\x1b[48;5;124m\x1b[38;5;231m w7\x1b[0m")) << text;
  EXPECT_TRUE(absl::StrContains(text, "+0.4"));
  EXPECT_FALSE(absl::StrContains(text, "+0.3\n"));
  EXPECT_EQ(Lines(text), 8);  // the text, the legend, a head and five rows
}

TEST(RenderRow, NoTokenReachesTheTerminalUnescaped) {
  const std::vector<TokenLabel> tokens = Labels({"\x1b]0;title\x07", "\n\n"});
  const std::string plain = RowText(kPlain, tokens, {1, 2});
  EXPECT_EQ(plain.find('\x1b'), std::string::npos);
  EXPECT_EQ(plain.find('\x07'), std::string::npos);
  const std::string color = RowText(kColor, tokens, {1, 2});
  EXPECT_EQ(color.find("\x1b]"), std::string::npos);
  EXPECT_TRUE(absl::StrContains(color, "\\n\\n"));
}

TEST(RenderRow, ALongTableKeepsTheLargestInTheOrderOfTheText) {
  std::vector<float> values(1000, 0.001f);
  values[3] = 1;
  values[900] = -2;
  const std::string text = RowText(kPlain, Words(1000), values);
  EXPECT_LT(Lines(text), 70);
  ASSERT_TRUE(absl::StrContains(text, "  \u2423w900"));
  EXPECT_LT(text.find("  \u2423w3 "), text.find("  \u2423w900"));
  EXPECT_TRUE(absl::StrContains(text, "largest by size of 1000"));
}

TEST(LabelTokens, TakesTheTextOfTheSpansAndMarksSharedCharacters) {
  google::protobuf::RepeatedPtrField<v1::Token> tokens;
  const auto add = [&](const std::string& piece, uint32_t begin, uint32_t end, bool special,
                       bool partial) {
    v1::Token* token = tokens.Add();
    token->set_id(7);
    token->set_piece(piece);
    token->set_begin_byte(begin);
    token->set_end_byte(end);
    token->set_special(special);
    token->set_partial(partial);
  };
  add("<s>", 0, 0, true, false);
  add("a", 0, 1, false, false);
  add("\u0120b", 1, 3, false, false);
  add("x", 3, 7, false, true);
  add("y", 3, 7, false, true);
  add("", 0, 0, false, false);
  add("out", 5, 99, false, false);  // a span outside the text is not followed
  const auto labels = LabelTokens(tokens, "a b\U0001f600");
  const std::vector<std::string> expected = {"<s>", "a", " b", "\U0001f600", "~", "#7", "out"};
  ASSERT_EQ(labels.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(labels[i].text, expected[i]);
  EXPECT_TRUE(labels[0].special);
  EXPECT_EQ(ReadablePiece("\u2581of", 3), " of");
}

TEST(RenderTensor, ARowWithoutItsTargetKeepsThePositionsOfTheOthers) {
  const std::string text =
      TensorText(kPlain, Info({{"input_tokens", 2}}), {0.5f, 0.25f}, Words(3), 1);
  EXPECT_TRUE(absl::StrContains(text, "    2  \u2423w2")) << text;
  EXPECT_FALSE(absl::StrContains(text, "w1"));
}

// `layers` causal maps of ones.
std::vector<float> Maps(int64_t layers, int64_t length) {
  std::vector<float> values;
  for (int64_t i = 0; i < layers * length * length; ++i) {
    values.push_back(i % length <= i / length % length ? 1 : 0);
  }
  return values;
}

TEST(RenderTensor, SmallMapsAreDrawnWithColour) {
  v1::TensorInfo info = Info({{"layers", 3}, {"output_tokens", 6}, {"input_tokens", 6}});
  for (const int layer : {2, 5, 9}) info.mutable_axes(0)->add_labels(layer);
  const std::string text = TensorText(kColor, info, Maps(3, 6), Words(6), 5);
  EXPECT_TRUE(absl::StrContains(text, "layer 9"));
  EXPECT_TRUE(absl::StrContains(text, "\u2580"));
  EXPECT_EQ(Lines(text), 5);  // titles, 6 rows two by two, the legend
}

TEST(RenderTensor, WithoutColourAMapShowsTheTargetsRowOfEachLayer) {
  const v1::TensorInfo info = Info({{"layers", 2}, {"output_tokens", 4}, {"input_tokens", 4}});
  const std::string text = TensorText(kPlain, info, Maps(2, 4), Words(4), 1);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_TRUE(absl::StrContains(text, "row of position 1"));
  EXPECT_TRUE(absl::StrContains(text, "layer 1  @@    +1")) << text;
}

TEST(RenderTensor, LargeMapsAndManyLayersStayBounded) {
  const v1::TensorInfo wide = Info({{"layers", 4}, {"output_tokens", 300}, {"input_tokens", 300}});
  EXPECT_EQ(Lines(TensorText(kColor, wide, Maps(4, 300), Words(300), 299)), 6);
  const v1::TensorInfo deep = Info({{"layers", 900}, {"output_tokens", 20}, {"input_tokens", 20}});
  EXPECT_LT(Lines(TensorText(kColor, deep, Maps(900, 20), Words(20), 19)), 140);
}

TEST(RenderTensor, RowsOfLayersAreOneLineEach) {
  const v1::TensorInfo info = Info({{"layers", 2}, {"input_tokens", 3}});
  const std::string text = TensorText(kPlain, info, {1, 0, 0, 0, 0, 1}, Words(3), 2);
  EXPECT_TRUE(absl::StrContains(text, "layer 0  @  ")) << text;
  EXPECT_TRUE(absl::StrContains(text, "\u2423w2 @2")) << text;
}

TEST(RenderTensor, OtherShapesAreSummedUp) {
  const v1::TensorInfo info = Info({{"layers", 1}, {"input_tokens", 2}, {"channels", 2}});
  const std::string text = TensorText(kColor, info, {1, 2, 3, 6}, Words(2), 1);
  EXPECT_TRUE(absl::StrContains(text, "smallest +1, mean +3, largest +6 of 4 values")) << text;
  EXPECT_TRUE(
      absl::StrContains(TensorText(kColor, Info({{"input_tokens", 0}}), {}, {}, 0), "no values"));
}

}  // namespace
}  // namespace mambascope::cli
