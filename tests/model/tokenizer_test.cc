#include "server/model/tokenizer.h"

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace mambascope::model {
namespace {

constexpr char kDemoPath[] = MAMBASCOPE_SOURCE_DIR "/deploy/models/atlas-mamba/1/tokenizer.json";
constexpr char kCasesPath[] = MAMBASCOPE_SOURCE_DIR "/tests/golden/tokenizer/cases.tsv";

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

// A file that lives as long as the object.
class ScratchFile {
 public:
  explicit ScratchFile(absl::string_view contents) {
    static int count = 0;
    path_ = absl::StrCat(testing::TempDir(), "tokenizer_test_", getpid(), "_", count++, ".json");
    std::ofstream(path_, std::ios::binary) << contents;
  }
  ~ScratchFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::unique_ptr<const Tokenizer> FromJson(absl::string_view json) {
  auto tokenizer = Tokenizer::Load(ScratchFile(json).path());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

// The demo's tokenizer with one part of its file replaced.
std::unique_ptr<const Tokenizer> DemoWith(absl::string_view part, absl::string_view replacement) {
  std::string json = Contents(kDemoPath);
  EXPECT_EQ(absl::StrReplaceAll({{part, replacement}}, &json), 1) << part;
  return FromJson(json);
}

// A top-level key that the library does not know is an error, so the old part must go.
std::string DemoJsonWithPostProcessor(absl::string_view replacement) {
  const std::string json = Contents(kDemoPath);
  const size_t begin = json.find("\"post_processor\":");
  const size_t end = json.find("\"decoder\":");
  EXPECT_LT(begin, end);
  return absl::StrCat(json.substr(0, begin), "\"post_processor\": ", replacement, ", ",
                      json.substr(end));
}

const Tokenizer& Demo() {
  static const Tokenizer* const tokenizer = Tokenizer::Load(kDemoPath)->release();
  return *tokenizer;
}

std::vector<Token> Encode(const Tokenizer& tokenizer, absl::string_view text,
                          bool add_special_tokens = true) {
  auto tokens = tokenizer.Encode(text, add_special_tokens);
  EXPECT_TRUE(tokens.ok()) << tokens.status();
  return tokens.ok() ? *std::move(tokens) : std::vector<Token>();
}

std::string Decode(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                   bool skip_special_tokens = false) {
  auto text = tokenizer.Decode(ids, skip_special_tokens);
  EXPECT_TRUE(text.ok()) << text.status();
  return text.ok() ? *std::move(text) : std::string();
}

std::vector<int32_t> Ids(const std::vector<Token>& tokens) {
  std::vector<int32_t> ids;
  for (const Token& token : tokens) ids.push_back(token.id);
  return ids;
}

std::string Spans(const std::vector<Token>& tokens) {
  return absl::StrJoin(tokens, ",", [](std::string* out, const Token& token) {
    absl::StrAppend(out, token.begin_byte, ":", token.end_byte);
  });
}

void AppendUtf8(char32_t c, std::string* text) {
  const auto tail = [&](int shift) {
    text->push_back(static_cast<char>(0x80 | (c >> shift & 0x3F)));
  };
  if (c < 0x80) {
    text->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    text->push_back(static_cast<char>(0xC0 | c >> 6));
    tail(0);
  } else if (c < 0x10000) {
    text->push_back(static_cast<char>(0xE0 | c >> 12));
    tail(6), tail(0);
  } else {
    text->push_back(static_cast<char>(0xF0 | c >> 18));
    tail(12), tail(6), tail(0);
  }
}

// Half of the characters are ASCII, as words and spaces matter most; the others come from
// everywhere.
std::string RandomText(int characters, std::mt19937* random) {
  const auto below = [&](uint32_t limit) { return static_cast<char32_t>((*random)() % limit); };
  std::string text;
  for (int i = 0; i < characters; ++i) {
    switch (below(8)) {
      case 0:
        AppendUtf8(0x80 + below(0x780), &text);
        break;
      case 1:
        AppendUtf8(0x300 + below(0x70), &text);
        break;  // combining marks
      case 2:
        AppendUtf8(0x4E00 + below(0x5000), &text);
        break;
      case 3:
        AppendUtf8(0xE000 + below(0x110000 - 0xE000), &text);
        break;
      case 4:
        text.push_back(' ');
        break;
      default:
        AppendUtf8(below(0x80), &text);
    }
  }
  return text;
}

const std::vector<std::string>& OddTexts() {
  using namespace std::string_literals;
  static const auto& texts = *new std::vector<std::string>{
      "",
      " ",
      "\0"s,
      "a\0b\0\0c"s,
      "\u0301",  // a lone combining mark
      "\u0301\u0302 e\u0301\u0327",
      "👨‍👩‍👧‍👦 and 👍🏽",  // joined emoji
      "🏴\U000E0067\U000E0062\U000E0073\U000E0063\U000E0074\U000E007F",
      "<|endoftext|>",
      "x<|endoftext|><|padding|> y <|endoftext",
      "\uFEFFmark \uFFFD \uFFFF \U0010FFFF",
      "مرحبا 日本語 हिन्दी",
      std::string(5000, 'a'),
      std::string(5000, ' ') + "x",
  };
  return texts;
}

void ExpectSpansAreSound(const std::vector<Token>& tokens, absl::string_view text) {
  const auto boundary = [&](uint32_t byte) {
    return byte == text.size() || (byte < text.size() && (text[byte] & 0xC0) != 0x80);
  };
  uint32_t covered = 0, begin = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Token& token = tokens[i];
    ASSERT_TRUE(boundary(token.begin_byte) && boundary(token.end_byte)) << "token " << i;
    ASSERT_LE(token.begin_byte, token.end_byte) << "token " << i;
    ASSERT_GE(token.begin_byte, begin) << "token " << i;
    ASSERT_GE(token.end_byte, covered) << "token " << i;
    ASSERT_LE(token.begin_byte, covered) << "a gap in front of token " << i;
    if (token.begin_byte < covered) {
      ASSERT_TRUE(token.partial && tokens[i - 1].partial) << "token " << i;
    }
    begin = token.begin_byte;
    covered = token.end_byte;
  }
  ASSERT_EQ(covered, text.size());
}

TEST(Tokenizer, TheDemoLoadsWithItsWholeVocabulary) {
  EXPECT_EQ(Demo().vocabulary_size(), 2048);
  EXPECT_EQ(Demo().Piece(0), "<|endoftext|>");
  EXPECT_TRUE(Demo().IsSpecial(0));
  EXPECT_TRUE(Demo().IsSpecial(1));
  EXPECT_FALSE(Demo().IsSpecial(2));
}

TEST(Tokenizer, AnIdThatNoTokenHasIsEmptyAndNotSpecial) {
  for (int32_t id : {-1, INT32_MIN, 2048, INT32_MAX}) {
    EXPECT_EQ(Demo().Piece(id), "");
    EXPECT_FALSE(Demo().IsSpecial(id));
  }
}

TEST(Tokenizer, IdsAndSpansAreThoseOfThePythonPackage) {
  int cases = 0;
  std::istringstream lines(Contents(kCasesPath));
  for (std::string line; std::getline(lines, line); ++cases) {
    SCOPED_TRACE(line);
    const std::vector<std::string> fields = absl::StrSplit(line, '\t');
    ASSERT_EQ(fields.size(), 3u);
    const std::vector<Token> tokens = Encode(Demo(), absl::HexStringToBytes(fields[0]));
    EXPECT_EQ(absl::StrJoin(Ids(tokens), ","), fields[1]);
    EXPECT_EQ(Spans(tokens), fields[2]);
  }
  EXPECT_GE(cases, 30);
}

TEST(Tokenizer, DecodingWhatWasEncodedGivesTheTextBack) {
  std::mt19937 random(1);
  std::vector<std::string> texts = OddTexts();
  for (int i = 0; i < 300; ++i) texts.push_back(RandomText(i, &random));
  for (const std::string& text : texts) {
    SCOPED_TRACE(absl::CEscape(text));
    const std::vector<Token> tokens = Encode(Demo(), text, /*add_special_tokens=*/false);
    ASSERT_EQ(Decode(Demo(), Ids(tokens)), text);
  }
}

TEST(Tokenizer, SpansAreOrderedCoverTheTextAndKeepCharactersWhole) {
  std::mt19937 random(2);
  std::vector<std::string> texts = OddTexts();
  for (int i = 0; i < 300; ++i) texts.push_back(RandomText(i, &random));
  for (const std::string& text : texts) {
    SCOPED_TRACE(absl::CEscape(text));
    ASSERT_NO_FATAL_FAILURE(ExpectSpansAreSound(Encode(Demo(), text), text));
    ASSERT_NO_FATAL_FAILURE(ExpectSpansAreSound(Encode(Demo(), text, false), text));
  }
}

TEST(Tokenizer, EveryTokenOfASplitCharacterHasTheWholeCharacterAndIsPartial) {
  const std::vector<Token> tokens = Encode(Demo(), "a 😀b", /*add_special_tokens=*/false);
  EXPECT_EQ(Spans(tokens), "0:1,1:2,2:6,2:6,2:6,2:6,6:7");
  for (size_t i = 0; i < tokens.size(); ++i) EXPECT_EQ(tokens[i].partial, i >= 2 && i <= 5) << i;
}

TEST(Tokenizer, ATokenIncludesTheSpaceThatItBeginsWith) {
  const std::vector<Token> tokens = Encode(Demo(), "is Paris", /*add_special_tokens=*/false);
  EXPECT_EQ(tokens.back().piece, "ĠParis");
  EXPECT_EQ(tokens.back().begin_byte, 2u);
  EXPECT_EQ(tokens.back().end_byte, 8u);
}

TEST(Tokenizer, SpansIncludeTheSpaceEvenIfTheFileTrimsOffsets) {
  const std::string trimming =
      R"({"type": "ByteLevel", "trim_offsets": true, "add_prefix_space": false,
          "use_regex": true})";
  for (const std::string& post_processor :
       {trimming, absl::StrCat(R"({"type": "Sequence", "processors": [)", trimming, "]}")}) {
    const auto tokenizer = FromJson(DemoJsonWithPostProcessor(post_processor));
    ASSERT_NE(tokenizer, nullptr);
    EXPECT_EQ(Spans(Encode(*tokenizer, "is Paris")), "0:2,2:8");
  }
}

TEST(Tokenizer, SpansReferToTheTextBeforeNormalisation) {
  const auto composing = DemoWith(R"("normalizer": null)", R"("normalizer": {"type": "NFKC"})");
  ASSERT_NE(composing, nullptr);
  // R and U+0311 become one character with two byte tokens; the ligature's f joins the space, and
  // its i is a token of its own.
  const std::vector<Token> tokens = Encode(*composing, "xR\u0311 \uFB01", false);
  EXPECT_EQ(Decode(*composing, Ids(tokens)), "x\u0212 fi");
  EXPECT_EQ(Spans(tokens), "0:1,1:4,1:4,4:8,5:8");
  for (size_t i = 0; i < tokens.size(); ++i) EXPECT_EQ(tokens[i].partial, i > 0) << i;
  std::mt19937 random(3);
  for (int i = 0; i < 100; ++i) {
    const std::string text = RandomText(i, &random);
    SCOPED_TRACE(absl::CEscape(text));
    ASSERT_NO_FATAL_FAILURE(ExpectSpansAreSound(Encode(*composing, text), text));
  }
}

TEST(Tokenizer, TextThatTheTokenizerDropsGoesToTheTokenBeforeIt) {
  const auto words = FromJson(R"({"version":"1.0", "pre_tokenizer": {"type":"WhitespaceSplit"},
    "model": {"type":"WordLevel","unk_token":"?","vocab":{"?":0,"a":1,"b":2}}})");
  ASSERT_NE(words, nullptr);
  EXPECT_EQ(Spans(Encode(*words, "  a \n b ")), "0:6,6:8");
  EXPECT_EQ(Spans(Encode(*words, "  ")), "");
}

TEST(Tokenizer, TheTemplatesTokensAreSpecialAndEmptyWhereTheyStand) {
  const std::vector<Token> tokens = Encode(Demo(), "Paris");
  ASSERT_GT(tokens.size(), 1u);
  EXPECT_TRUE(tokens[0].special);
  EXPECT_EQ(tokens[0].id, 0);
  EXPECT_EQ(tokens[0].begin_byte, tokens[0].end_byte);

  const auto ending = DemoWith(R"("single": [)", R"("single": [
    {"Sequence": {"id": "A", "type_id": 0}},
    {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}], "ignored": [)");
  ASSERT_NE(ending, nullptr);
  const std::vector<Token> ended = Encode(*ending, "Paris");
  EXPECT_TRUE(ended.back().special);
  EXPECT_EQ(ended.back().begin_byte, 5u);
  EXPECT_EQ(ended.back().end_byte, 5u);
}

TEST(Tokenizer, TextThatSpellsASpecialTokenBecomesItWithItsSpan) {
  const std::vector<Token> tokens = Encode(Demo(), "é<|endoftext|>", /*add_special_tokens=*/false);
  EXPECT_EQ(tokens.back().id, 0);
  EXPECT_TRUE(tokens.back().special);
  EXPECT_EQ(tokens.back().begin_byte, 2u);
  EXPECT_EQ(tokens.back().end_byte, 15u);
}

TEST(Tokenizer, SkippingSpecialTokensLeavesOnlyTheText) {
  const std::vector<int32_t> ids = Ids(Encode(Demo(), "Paris<|endoftext|> is"));
  EXPECT_EQ(Decode(Demo(), ids, true), "Paris is");
  EXPECT_EQ(Decode(Demo(), ids, false), "<|endoftext|>Paris<|endoftext|> is");
}

TEST(Tokenizer, TruncationAndPaddingInTheFileAreIgnored) {
  const auto cutting = DemoWith(R"("truncation": null)",
                                R"("truncation": {"direction": "Right", "max_length": 3,
                                    "strategy": "LongestFirst", "stride": 0})");
  const auto padding = DemoWith(R"("padding": null)",
                                R"("padding": {"strategy": {"Fixed": 20}, "direction": "Right",
                                    "pad_to_multiple_of": null, "pad_id": 1, "pad_type_id": 0,
                                    "pad_token": "<|padding|>"})");
  for (const auto* changed : {&cutting, &padding}) {
    ASSERT_NE(*changed, nullptr);
    EXPECT_EQ(Ids(Encode(**changed, "a b c d e f")), Ids(Encode(Demo(), "a b c d e f")));
  }
}

TEST(Tokenizer, AMegabyteOfAnyKindIsEncoded) {
  constexpr int kMegabyte = 1 << 20;
  std::mt19937 random(4);
  std::string words;
  while (words.size() < kMegabyte) words += "The capital of France is Paris. ";
  for (const std::string& text :
       {words, std::string(kMegabyte, 'a'), std::string(kMegabyte, ' ') + "x",
        RandomText(kMegabyte / 2, &random)}) {
    const std::vector<Token> tokens = Encode(Demo(), text, /*add_special_tokens=*/false);
    EXPECT_TRUE(Decode(Demo(), Ids(tokens)) == text);
    ASSERT_NO_FATAL_FAILURE(ExpectSpansAreSound(tokens, text));
  }
}

TEST(Tokenizer, TextThatIsNotUtf8IsRefusedWithTheByte) {
  for (const char* text :
       {"ab\xFF", "ab\xC3", "ab\xED\xA0\x80", "ab\xC0\xAF", "ab\xF4\x90\x80\x80"}) {
    const auto tokens = Demo().Encode(text);
    EXPECT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(tokens.status().message(), "text: not valid UTF-8 at byte 2");
  }
}

TEST(Tokenizer, DecodeRefusesAnIdOutsideTheVocabularyAndNamesBoth) {
  const std::vector<std::pair<int32_t, std::string>> cases = {
      {-1, "ids[1]: -1 is not in [0, 2048), the vocabulary"},
      {2048, "ids[1]: 2048 is not in [0, 2048), the vocabulary"},
      {INT32_MIN, "ids[1]: -2147483648 is not in [0, 2048), the vocabulary"},
      {INT32_MAX, "ids[1]: 2147483647 is not in [0, 2048), the vocabulary"}};
  for (const auto& [id, message] : cases) {
    const std::vector<int32_t> ids = {5, id};
    const auto text = Demo().Decode(ids, false);
    EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(text.status().message(), message);
  }
}

TEST(Tokenizer, NoTokensDecodeToNoText) { EXPECT_EQ(Decode(Demo(), {}), ""); }

TEST(Tokenizer, BytesThatAreNotUtf8DecodeToReplacements) {
  std::vector<int32_t> ids = Ids(Encode(Demo(), "😀", /*add_special_tokens=*/false));
  ids.pop_back();
  EXPECT_EQ(Decode(Demo(), ids), "\uFFFD");
}

TEST(Tokenizer, AFileThatIsNoTokenizerIsRefusedByName) {
  const std::string demo = Contents(kDemoPath);
  const std::string deep = R"({"version":"1.0","normalizer":)" + std::string(100000, '[');
  for (const std::string& json :
       {std::string(), std::string("not json"), std::string("{}"), std::string("[]"),
        std::string("null"), std::string("\xFF\xFE\x00\x01", 4), demo.substr(0, demo.size() / 2),
        demo.substr(0, demo.size() - 2), deep,
        std::string(R"({"version":"1.0","model":{"type":"Mamba","vocab":{}}})"),
        std::string(R"({"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}})"),
        std::string(
            R"({"version":"1.0","model":{"type":"BPE","vocab":{"a":4294967295},"merges":[]}})"),
        std::string(R"({"version":"1.0","model":{"type":"BPE","vocab":{"a":-1},"merges":[]}})"),
        std::string(R"({"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["b c"]}})"),
        std::string(R"({"version":"2.0","model":{"type":"BPE","vocab":{"a":0},"merges":[]}})")}) {
    SCOPED_TRACE(json.substr(0, 100));
    const ScratchFile file(json);
    const auto tokenizer = Tokenizer::Load(file.path());
    ASSERT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message(tokenizer.status().message());
    EXPECT_EQ(message.rfind(file.path() + ": ", 0), 0u) << message;
    EXPECT_GT(message.size(), file.path().size() + 5) << message;
  }
}

TEST(Tokenizer, APanicOfTheLibraryIsAnError) {
  // The library unwraps where it parses a decoder, so it panics here and not at other broken JSON.
  const auto tokenizer = Tokenizer::Load(ScratchFile(R"({"version": "1.0", "decoder": -})").path());
  EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(tokenizer.status().message()), testing::HasSubstr("panicked: "));
}

TEST(Tokenizer, ATemplateThatNeedsAnUnknownTokenIsRefusedAtLoad) {
  for (const char* post_processor :
       {R"({"type": "BertProcessing", "sep": ["x", 2048], "cls": ["<|endoftext|>", 0]})",
        R"({"type": "TemplateProcessing", "pair": [], "special_tokens": {},
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}]})"}) {
    SCOPED_TRACE(post_processor);
    const auto tokenizer =
        Tokenizer::Load(ScratchFile(DemoJsonWithPostProcessor(post_processor)).path());
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(Tokenizer, APathThatIsNoFileIsRefusedByName) {
  for (const std::string& path : {std::string("/no/such/tokenizer.json"), testing::TempDir(),
                                  std::string("/dev/zero"), std::string()}) {
    const auto tokenizer = Tokenizer::Load(path);
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(std::string(tokenizer.status().message()).rfind(path + ": ", 0), 0u);
  }
}

TEST(Tokenizer, AHoleInTheVocabularyCountsButHasNoPiece) {
  const auto tokenizer =
      FromJson(R"({"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"b":7},"merges":[]}})");
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->vocabulary_size(), 8);
  EXPECT_EQ(tokenizer->Piece(3), "");
  EXPECT_EQ(tokenizer->Piece(7), "b");
}

// A SentencePiece-like vocabulary: spaces spelled as "▁", unknown characters as bytes.
TEST(Tokenizer, ByteFallbackGivesEachByteTheWholeCharacter) {
  const auto tokenizer = FromJson(R"({"version":"1.0",
    "pre_tokenizer": {"type":"Metaspace","replacement":"▁","prepend_scheme":"always",
      "split":false},
    "model": {"type":"BPE","byte_fallback":true,"merges":[],
      "vocab":{"▁":0,"a":1,"b":2,"<0xE2>":3,"<0x82>":4,"<0xAC>":5}}})");
  ASSERT_NE(tokenizer, nullptr);
  const std::vector<Token> tokens = Encode(*tokenizer, "a €b");
  EXPECT_EQ(absl::StrJoin(Ids(tokens), ","), "0,1,0,3,4,5,2");
  ASSERT_NO_FATAL_FAILURE(ExpectSpansAreSound(tokens, "a €b"));
  for (int i : {3, 4, 5}) {
    EXPECT_EQ(tokens[i].begin_byte, 2u);
    EXPECT_EQ(tokens[i].end_byte, 5u);
    EXPECT_TRUE(tokens[i].partial);
  }
}

TEST(Tokenizer, ManyThreadsMayUseOneTokenizer) {
  const std::string text = "The capital of France is Paris, 日本語 👨‍👩‍👧.";
  const std::vector<int32_t> ids = Ids(Encode(Demo(), text));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        ASSERT_EQ(Ids(Encode(Demo(), text)), ids);
        ASSERT_EQ(Decode(Demo(), ids, true), text);
        Encode(Demo(), absl::StrCat("word", t, i));  // new words go into the library's cache
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace mambascope::model
