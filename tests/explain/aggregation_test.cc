#include "server/explain/aggregation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <sstream>

#include "server/explain/text_segments.h"

namespace mambascope::explain {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::string> Pieces(const std::string& text, const std::vector<uint32_t>& starts) {
  std::vector<std::string> pieces;
  for (size_t i = 0; i < starts.size(); ++i) {
    const uint32_t end = i + 1 < starts.size() ? starts[i + 1] : static_cast<uint32_t>(text.size());
    pieces.push_back(text.substr(starts[i], end - starts[i]));
  }
  return pieces;
}
std::vector<std::string> Words(const std::string& text) { return Pieces(text, WordStarts(text)); }
std::vector<std::string> Sentences(const std::string& text) {
  return Pieces(text, SentenceStarts(text));
}

TEST(Words, HaveTheirLeadingWhitespaceAndStandApartFromPunctuation) {
  EXPECT_THAT(Words("The capital of France is"),
              ElementsAre("The", " capital", " of", " France", " is"));
  EXPECT_THAT(Words("Stop! (he said) \"no\"."),
              ElementsAre("Stop", "!", " (", "he", " said", ")", " \"", "no", "\"."));
  EXPECT_THAT(Words("  two\t\nspaces "), ElementsAre("  two", "\t\nspaces", " "));
  EXPECT_THAT(Words("well-known snake_case"), ElementsAre("well", "-", "known", " snake_case"));
}

TEST(Words, ApostrophesAndDecimalsDoNotSplitThem) {
  EXPECT_THAT(Words("don't it’s 'quoted'"), ElementsAre("don't", " it’s", " '", "quoted", "'"));
  EXPECT_THAT(Words("3.14, 1,000. v2.x"), ElementsAre("3.14", ",", " 1,000", ".", " v2", ".", "x"));
}

TEST(Words, KnowUnicode) {
  EXPECT_THAT(Words("Größe\u00a0naïve\u3000x"), ElementsAre("Größe", "\u00a0naïve", "\u3000x"));
  EXPECT_THAT(Words("你好，世界。"), ElementsAre("你好", "，", "世界", "。"));
  EXPECT_THAT(Words("a 😀👍🏽 b"), ElementsAre("a", " 😀👍🏽", " b"));
}

TEST(Sentences, EndAtTheirMarksAndAtLineBreaks) {
  EXPECT_THAT(Sentences("One. Two! Three? Four… five"),
              ElementsAre("One.", " Two!", " Three?", " Four…", " five"));
  EXPECT_THAT(Sentences("He said \"No.\" (Yes?!) So..."),
              ElementsAre("He said \"No.\"", " (Yes?!)", " So..."));
  EXPECT_THAT(Sentences("Title\n\nBody \r\n end.\n"),
              ElementsAre("Title", "\n\nBody", " \r\n end.\n"));
  EXPECT_THAT(Sentences("你好。再见！「好。」走"),
              ElementsAre("你好。", "再见！", "「好。」", "走"));
}

TEST(Sentences, DoNotEndWithinNumbersAndNames) {
  EXPECT_THAT(Sentences("Pi is 3.14 at example.com today"),
              ElementsAre("Pi is 3.14 at example.com today"));
}

TEST(Segments, OfNothingAndOfWhitespaceAlone) {
  EXPECT_THAT(Words(""), IsEmpty());
  EXPECT_THAT(Sentences(""), IsEmpty());
  EXPECT_THAT(Words(" \n "), ElementsAre(" \n "));
  EXPECT_THAT(Sentences(" \n "), ElementsAre(" \n "));
  EXPECT_THAT(Sentences("."), ElementsAre("."));
}

TEST(Segments, CoverAnyBytes) {
  std::mt19937_64 random(11);
  const std::string alphabet = "a1 .,!?'\"\n\xf0\x9f\x98\x80\xe3\x80\x82\xff";
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (size_t i = random() % 20; i > 0; --i) text += alphabet[random() % alphabet.size()];
    for (const auto& starts : {WordStarts(text), SentenceStarts(text)}) {
      ASSERT_EQ(starts.empty(), text.empty());
      for (size_t i = 0; i < starts.size(); ++i) {
        ASSERT_LT(starts[i], text.size());
        ASSERT_TRUE(i == 0 ? starts[i] == 0 : starts[i] > starts[i - 1]);
      }
    }
  }
}

// ---- groups ----

v1::Aggregation All(std::initializer_list<std::pair<uint32_t, uint32_t>> spans = {}) {
  v1::Aggregation options;
  options.set_words(true);
  options.set_sentences(true);
  for (const auto& [begin, end] : spans) {
    options.add_spans()->set_begin(begin);
    options.mutable_spans()->rbegin()->set_end(end);
  }
  return options;
}

// As "[begin byte, end byte) [begin token, end token) = score".
std::vector<std::string> Spelled(const v1::GroupedScores& grouped) {
  std::vector<std::string> lines;
  for (const auto& group : grouped.groups()) {
    std::ostringstream line;
    line << group.begin_byte() << "-" << group.end_byte() << " " << group.begin_token() << "-"
         << group.end_token() << " = " << group.score() << (group.special() ? " special" : "");
    lines.push_back(line.str());
  }
  return lines;
}

TEST(Aggregate, SumsTokensOfWordsSentencesAndSpans) {
  const std::string text = "Hello there. Bye";
  const std::vector<TokenSpan> tokens = {{0, 0, true}, {0, 3}, {3, 5}, {5, 11}, {11, 12}, {12, 16}};
  const std::vector<float> scores = {100, 1, 2, 4, 8, 16};
  const auto grouped = Aggregate(All({{3, 11}, {13, 16}}), text, tokens, scores);
  ASSERT_EQ(grouped.size(), 3u);
  EXPECT_EQ(grouped[0].kind(), "words");
  EXPECT_THAT(Spelled(grouped[0]), ElementsAre("0-0 0-1 = 100 special", "0-5 1-3 = 3",
                                               "5-11 3-4 = 4", "11-12 4-5 = 8", "12-16 5-6 = 16"));
  EXPECT_EQ(grouped[1].kind(), "sentences");
  EXPECT_THAT(Spelled(grouped[1]),
              ElementsAre("0-0 0-1 = 100 special", "0-12 1-5 = 15", "12-16 5-6 = 16"));
  EXPECT_EQ(grouped[2].kind(), "spans");
  EXPECT_THAT(Spelled(grouped[2]), ElementsAre("3-11 2-4 = 6", "13-16 0-0 = 0"));
  EXPECT_EQ(grouped[2].rest(), 100 + 1 + 8 + 16);
}

// Each token of a split character carries the whole character's span.
TEST(Aggregate, ASplitCharacterIsInOneGroup) {
  const std::string text = "hi 😀!";  // h i space emoji(3-7) !
  const std::vector<TokenSpan> tokens = {{0, 2}, {2, 7}, {3, 7}, {3, 7}, {3, 7}, {7, 8}};
  const std::vector<float> scores = {1, 2, 4, 8, 16, 32};
  const auto grouped = Aggregate(All({{3, 7}}), text, tokens, scores);
  EXPECT_THAT(Spelled(grouped[0]), ElementsAre("0-2 0-1 = 1", "2-7 1-5 = 30", "7-8 5-6 = 32"));
  EXPECT_THAT(Spelled(grouped[2]), ElementsAre("3-7 2-5 = 28"));
  EXPECT_EQ(grouped[2].rest(), 35);
}

TEST(Aggregate, ATokenOverTwoWordsIsInTheFirst) {
  const std::vector<TokenSpan> tokens = {{0, 4}, {4, 5}};  // "a b " of "a b c"
  const std::vector<float> scores = {1, 2};
  EXPECT_THAT(Spelled(Aggregate(All(), "a b c", tokens, scores)[0]),
              ElementsAre("0-4 0-1 = 1", "4-5 1-2 = 2"));
}

TEST(Aggregate, ASpelledSpecialTokenStandsAlone) {
  const std::vector<TokenSpan> tokens = {{0, 1}, {1, 5, true}, {5, 6, true}, {6, 7}};
  const std::vector<float> scores = {1, 2, 4, 8};
  const auto grouped = Aggregate(All({{0, 7}}), "a<s>|xb", tokens, scores);
  EXPECT_THAT(Spelled(grouped[0]), ElementsAre("0-1 0-1 = 1", "1-1 1-2 = 2 special",
                                               "5-5 2-3 = 4 special", "6-7 3-4 = 8"));
  EXPECT_THAT(Spelled(grouped[2]), ElementsAre("0-7 0-4 = 15"));  // the caller named its bytes
}

TEST(Aggregate, WhatFollowsNoTextIsAGroupWithoutBytes) {
  const std::vector<TokenSpan> tokens = {{0, 1}, {1, 1}};
  const std::vector<float> scores = {1, 2, 4, 8};  // two generated tokens more
  const auto grouped = Aggregate(All({{0, 1}}), "a", tokens, scores);
  EXPECT_THAT(Spelled(grouped[0]), ElementsAre("0-1 0-1 = 1", "1-1 1-4 = 14"));
  EXPECT_EQ(grouped[2].rest(), 14);
}

TEST(Aggregate, OfNothingIsNothing) {
  const auto grouped = Aggregate(All(), "", {}, {});
  EXPECT_EQ(grouped.size(), 2u);
  EXPECT_EQ(grouped[0].groups_size(), 0);
  const std::vector<TokenSpan> only_special = {{0, 0, true}};
  const std::vector<float> scores = {3};
  EXPECT_THAT(Spelled(Aggregate(All(), "", only_special, scores)[1]),
              ElementsAre("0-0 0-1 = 3 special"));
  EXPECT_THAT(Aggregate({}, "a", only_special, scores), IsEmpty());
}

TEST(Aggregate, KeepsTheTotalOfRandomTokens) {
  std::mt19937_64 random(7);
  const std::string alphabet = "ab .,!?\n'1";
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (size_t i = 1 + random() % 60; i > 0; --i) text += alphabet[random() % alphabet.size()];
    std::vector<TokenSpan> tokens;
    std::vector<float> scores;
    const auto size = static_cast<uint32_t>(text.size());
    for (uint32_t at = 0; at < size;) {
      const uint32_t end = std::min<uint32_t>(size, at + static_cast<uint32_t>(random() % 6));
      tokens.push_back({at, end, random() % 10 == 0});
      scores.push_back(std::ldexp(static_cast<float>(random() % 2001) - 1000, -7));  // exact sums
      at = end;
    }
    const uint32_t middle = size / 2;
    v1::Aggregation options = middle > 0 ? All({{middle, size}, {0, middle}}) : All({{0, size}});
    const double total = std::accumulate(scores.begin(), scores.end(), 0.0);
    for (const v1::GroupedScores& grouped : Aggregate(options, text, tokens, scores)) {
      double sum = grouped.rest();
      int32_t token = 0;
      uint32_t byte = 0;
      for (const auto& group : grouped.groups()) {
        sum += group.score();
        if (grouped.kind() == "spans") continue;
        EXPECT_EQ(group.begin_token(), token);  // every token once
        EXPECT_LE(byte, group.begin_byte());
        EXPECT_LE(group.begin_byte(), group.end_byte());
        token = group.end_token();
        byte = group.end_byte();
      }
      if (grouped.kind() != "spans") {
        EXPECT_EQ(token, static_cast<int32_t>(tokens.size()));
      }
      EXPECT_EQ(sum, total) << grouped.kind();
    }
  }
}

// ---- checks ----

std::vector<std::string> Problems(const v1::Aggregation& options, const std::string* text,
                                  model::Family family = model::Family::kMamba) {
  model::ModelConfig config;
  config.family = family;
  Violations violations;
  CheckAggregation(options, text, config, "f", violations);
  std::vector<std::string> lines;
  for (const auto& [field, description] : violations.list())
    lines.push_back(field + ": " + description);
  return lines;
}

TEST(CheckAggregation, NamesEveryFault) {
  const std::string text = "0123456789";
  EXPECT_THAT(Problems(All({{0, 3}, {3, 10}}), &text), IsEmpty());
  EXPECT_THAT(Problems(All({{0, 3}}), nullptr),
              ElementsAre("f.words: needs a text; the input is none",
                          "f.sentences: needs a text; the input is none",
                          "f.spans: needs a text; the input is none"));
  EXPECT_THAT(Problems(All({{5, 5}, {4, 3}, {2, 11}, {0, 3}, {1, 2}}), &text),
              ElementsAre("f.spans[0]: [5, 5) holds no byte", "f.spans[1]: [4, 3) holds no byte",
                          "f.spans[2]: [2, 11) is beyond the 10 bytes of the text",
                          "f.spans[3]: [0, 3) overlaps [2, 11) of entry 2",
                          "f.spans[4]: [1, 2) overlaps [0, 3) of entry 3"));
  v1::Aggregation pixels;
  pixels.set_pixels(true);
  EXPECT_THAT(Problems(pixels, &text), ElementsAre("f.pixels: is for image models only"));
  EXPECT_THAT(Problems(pixels, nullptr, model::Family::kVim), IsEmpty());
}

TEST(CheckAggregation, AThousandSpansCostNoMoreThanAFew) {
  const std::string text = "a";
  v1::Aggregation options;
  for (int i = 0; i < 1000; ++i) options.add_spans();
  const auto problems = Problems(options, &text);
  EXPECT_EQ(problems.size(), 65u);
  EXPECT_EQ(problems[0], "f.spans: 1000 spans exceed the limit 64");
}

}  // namespace
}  // namespace mambascope::explain
