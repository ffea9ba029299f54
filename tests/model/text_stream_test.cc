#include "server/model/text_stream.h"

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/model/tokenizer.h"

namespace mambascope::model {
namespace {

const Tokenizer& Demo() {
  static const Tokenizer* const tokenizer =
      Tokenizer::Load(MAMBASCOPE_SOURCE_DIR "/deploy/models/atlas-mamba/1/tokenizer.json")
          ->release();
  return *tokenizer;
}

// As SentencePiece vocabularies come: the first space of a text is dropped, and characters that
// have no token are bytes. 0 "▁", 1 "▁a", 2 "b", 3-5 the bytes of "€".
const Tokenizer& WithByteFallback() {
  static const Tokenizer* const tokenizer = [] {
    const std::string path =
        absl::StrCat(testing::TempDir(), "text_stream_test_", getpid(), ".json");
    std::ofstream(path) << R"({"version":"1.0",
      "decoder": {"type":"Sequence","decoders":[
        {"type":"Replace","pattern":{"String":"▁"},"content":" "}, {"type":"ByteFallback"},
        {"type":"Fuse"}, {"type":"Strip","content":" ","start":1,"stop":0}]},
      "model": {"type":"BPE","byte_fallback":true,"merges":[],
        "vocab":{"▁":0,"▁a":1,"b":2,"<0xE2>":3,"<0x82>":4,"<0xAC>":5}}})";
    auto loaded = Tokenizer::Load(path);
    std::filesystem::remove(path);
    return loaded->release();
  }();
  return *tokenizer;
}

std::vector<int32_t> Ids(absl::string_view text) {
  std::vector<int32_t> ids;
  const auto tokens = Demo().Encode(text);
  EXPECT_TRUE(tokens.ok()) << tokens.status();
  for (const Token& token : *tokens) ids.push_back(token.id);
  return ids;
}

bool IsUtf8(absl::string_view text) { return Demo().Encode(text).ok(); }

// Every part, the flushed one last.
std::vector<std::string> Parts(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  TextStream stream(tokenizer);
  std::vector<std::string> parts;
  for (int32_t id : ids) {
    auto part = stream.Push(id);
    EXPECT_TRUE(part.ok()) << part.status();
    EXPECT_TRUE(IsUtf8(*part));
    parts.push_back(*std::move(part));
  }
  parts.push_back(stream.Flush());
  EXPECT_TRUE(IsUtf8(parts.back()));
  return parts;
}

std::string Joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += part;
  return all;
}

std::vector<int32_t> RandomIds(const Tokenizer& tokenizer, int count, std::mt19937* random) {
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>((*random)() % tokenizer.vocabulary_size()));
  }
  return ids;
}

TEST(TextStream, TheJoinedPartsAreTheTextOfAllIds) {
  for (const char* text : {"", "Paris", "The capital of France is Paris.", "  two  spaces  ",
                           "日本語 👨‍👩‍👧‍👦 cafe\u0301", "x<|endoftext|> y"}) {
    SCOPED_TRACE(text);
    EXPECT_EQ(Joined(Parts(Demo(), Ids(text))), *Demo().Decode(Ids(text), true));
  }
}

// Random ids are mostly not UTF-8 where they hold bytes of characters.
TEST(TextStream, TheJoinedPartsAreTheTextOfAllIdsForRandomIds) {
  std::mt19937 random(1);
  for (int i = 0; i < 400; ++i) {
    SCOPED_TRACE(i);
    std::vector<int32_t> ids = RandomIds(Demo(), i, &random);
    // Every other time only bytes, 2 to 257 in this vocabulary: long runs without a whole
    // character.
    if (i % 2 == 1)
      for (int32_t& id : ids) id = 2 + id % 256;
    ASSERT_EQ(Joined(Parts(Demo(), ids)), *Demo().Decode(ids, true));
  }
}

TEST(TextStream, ACharacterComesWholeWithItsLastToken) {
  TextStream stream(Demo());
  const std::vector<int32_t> ids = Ids("😀");  // the template's token, then four bytes
  ASSERT_EQ(ids.size(), 5u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(*stream.Push(ids[i]), "");
  EXPECT_EQ(*stream.Push(ids[4]), "😀");
  EXPECT_EQ(stream.Flush(), "");
}

TEST(TextStream, EveryTokenThatEndsACharacterIsSentAtOnce) {
  const std::vector<int32_t> ids = Ids("The capital of France is Paris.");
  const std::vector<std::string> parts = Parts(Demo(), ids);
  for (size_t i = 1; i < ids.size(); ++i) {
    EXPECT_EQ(parts[i], *Demo().Decode(std::vector<int32_t>{ids[i]}, false)) << i;
  }
  EXPECT_EQ(parts.back(), "");
}

TEST(TextStream, AnUnfinishedCharacterIsFlushedAsAReplacement) {
  TextStream stream(Demo());
  std::vector<int32_t> ids = Ids("a😀");
  ids.pop_back();
  std::string all;
  for (int32_t id : ids) all += *stream.Push(id);
  EXPECT_EQ(all, "a");
  EXPECT_EQ(stream.Flush(), "\uFFFD");
}

TEST(TextStream, SpecialTokensAddNothing) {
  TextStream stream(Demo());
  EXPECT_EQ(*stream.Push(0), "");
  EXPECT_EQ(*stream.Push(1), "");
  EXPECT_EQ(stream.Flush(), "");
}

TEST(TextStream, AnUnknownIdIsAnErrorAndChangesNothing) {
  TextStream stream(Demo());
  const std::vector<int32_t> ids = Ids("Zürich 😀");
  std::string all;
  for (int32_t id : ids) {
    EXPECT_EQ(stream.Push(2048).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(stream.Push(-1).status().code(), absl::StatusCode::kInvalidArgument);
    all += *stream.Push(id);
  }
  EXPECT_EQ(all + stream.Flush(), "Zürich 😀");
}

TEST(TextStream, AfterAFlushTheStreamStartsAnew) {
  TextStream stream(Demo());
  for (int round = 0; round < 2; ++round) {
    std::string all;
    for (int32_t id : Ids("Paris €")) all += *stream.Push(id);
    EXPECT_EQ(all + stream.Flush(), "Paris €");
  }
}

TEST(TextStream, OnlyTheFirstSpaceIsDroppedByADecoderThatDropsIt) {
  std::vector<int32_t> ids(100, 1);
  std::string expected = "a";
  for (int i = 1; i < 100; ++i) expected += " a";
  ASSERT_EQ(*WithByteFallback().Decode(ids, true), expected);
  EXPECT_EQ(Joined(Parts(WithByteFallback(), ids)), expected);
}

TEST(TextStream, LongRunsOfByteTokensComeOutCharacterByCharacter) {
  std::vector<int32_t> ids = {1};
  std::string expected = "a";
  for (int i = 0; i < 100; ++i) {
    ids.insert(ids.end(), {3, 4, 5});
    expected += "€";
  }
  const std::vector<std::string> parts = Parts(WithByteFallback(), ids);
  EXPECT_EQ(Joined(parts), expected);
  for (size_t i = 1; i < ids.size(); ++i) EXPECT_EQ(parts[i], i % 3 == 0 ? "€" : "") << i;
}

TEST(TextStream, AnInvalidRunOfByteTokensLeavesWhatWasSent) {
  EXPECT_EQ(Joined(Parts(WithByteFallback(), {2, 3, 4, 5, 3, 4, 5, 3, 2})), "b€€\uFFFDb");
}

TEST(TextStream, AnInvalidRunOfByteTokensStillGivesUtf8) {
  std::mt19937 random(2);
  for (int i = 0; i < 200; ++i) {
    Parts(WithByteFallback(), RandomIds(WithByteFallback(), i, &random));  // expects UTF-8 parts
  }
}

// Ten times the tokens must not take a hundred times as long; only a loose bound survives a busy
// machine.
TEST(TextStream, ALongTextCostsNoMoreATokenThanAShortOne) {
  const auto seconds = [](int tokens, int32_t id) {
    TextStream stream(Demo());
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < tokens; ++i) EXPECT_TRUE(stream.Push(id).ok());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (int32_t id : {1701, 138}) {  // a word, and a byte that never completes a character
    EXPECT_LT(seconds(20000, id), 40 * seconds(2000, id));
  }
}

}  // namespace
}  // namespace mambascope::model
