#include "server/model/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/safetensors_io.h"

namespace mambascope::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::StoredTensors;
using Json = nlohmann::json;

constexpr char kFirst[] = "model-00001-of-00002.safetensors";
constexpr char kSecond[] = "model-00002-of-00002.safetensors";

class CheckpointFolder : public ::testing::Test {
 protected:
  CheckpointFolder()
      : folder_(::testing::TempDir() + "/checkpoint_" +
                ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~CheckpointFolder() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& file) const { return folder_ + "/" + file; }
  void Write(const std::string& file, const StoredTensors& tensors) const {
    testing::WriteSafetensors(Path(file), tensors);
  }
  void WriteIndex(const std::string& text) const {
    testing::WriteBytes(Path("model.safetensors.index.json"), text);
  }
  void WriteIndexOf(const Json& weight_map) const {
    WriteIndex(Json{{"metadata", {{"total_size", 12}}}, {"weight_map", weight_map}}.dump());
  }
  // Two shards of one and two tensors with their index.
  void WriteShards() const {
    Write(kFirst, {{"b", testing::StoreF32({1}, {1})}});
    Write(kSecond, {{"a", testing::StoreF32({2}, {2, 3})}, {"c", testing::StoreF32({1, 1}, {4})}});
    WriteIndexOf({{"a", kSecond}, {"b", kFirst}, {"c", kSecond}});
  }
  // What is wrong with the folder, `folder/` left out.
  std::string Fault(absl::StatusCode code = absl::StatusCode::kInvalidArgument) const {
    const auto checkpoint = Checkpoint::Open(folder_);
    if (checkpoint.ok()) return "accepted";
    EXPECT_EQ(checkpoint.status().code(), code);
    std::string message(checkpoint.status().message());
    EXPECT_EQ(message.find(folder_ + "/"), 0u) << message;
    for (size_t at; (at = message.find(folder_ + "/")) != std::string::npos;) {
      message.erase(at, folder_.size() + 1);
    }
    return message;
  }
  std::string FaultOfIndex(const std::string& text) const {
    WriteIndex(text);
    return Fault();
  }

  const std::string folder_;
};

float First(const TensorView* view) {
  float value = 0;
  std::memcpy(&value, view->bytes.data(), sizeof value);
  return value;
}

std::vector<std::string> Names(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const auto& file : checkpoint.files()) {
    names.push_back(std::filesystem::path(file->path()).filename());
  }
  return names;
}

TEST_F(CheckpointFolder, OneFileIsTheWholeCheckpoint) {
  Write("model.safetensors", {{"a", testing::StoreF32({2}, {2, 3})}});
  const auto checkpoint = Checkpoint::Open(folder_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->path(), Path("model.safetensors"));
  EXPECT_THAT(Names(**checkpoint), ElementsAre("model.safetensors"));
  ASSERT_NE((*checkpoint)->Find("a"), nullptr);
  EXPECT_EQ(First((*checkpoint)->Find("a")), 2);
  EXPECT_EQ((*checkpoint)->Find("b"), nullptr);
  EXPECT_EQ((*checkpoint)->tensors().size(), 1u);
}

TEST_F(CheckpointFolder, ShardsAreOneCheckpoint) {
  WriteShards();
  const auto checkpoint = Checkpoint::Open(folder_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->path(), Path("model.safetensors.index.json"));
  EXPECT_THAT(Names(**checkpoint), ElementsAre(kFirst, kSecond));
  ASSERT_EQ((*checkpoint)->tensors().size(), 3u);
  EXPECT_EQ(First((*checkpoint)->Find("b")), 1);
  EXPECT_EQ(First((*checkpoint)->Find("a")), 2);
  EXPECT_EQ(First((*checkpoint)->Find("c")), 4);
  EXPECT_EQ((*checkpoint)->Find("c")->shape, (std::vector<int64_t>{1, 1}));
}

TEST_F(CheckpointFolder, OneFileWinsOverAnIndexBesideIt) {
  WriteShards();
  WriteIndex("not even JSON");
  Write("model.safetensors", {{"whole", testing::StoreF32({1}, {5})}});
  const auto checkpoint = Checkpoint::Open(folder_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_NE((*checkpoint)->Find("whole"), nullptr);

  testing::WriteBytes(Path("model.safetensors"), "broken");  // and is not passed over when broken
  EXPECT_EQ(Fault(), "model.safetensors: has 6 bytes, too few for a safetensors file");
}

TEST_F(CheckpointFolder, AFolderWithoutWeightsIsNotFound) {
  EXPECT_EQ(Fault(absl::StatusCode::kNotFound),
            "model.safetensors: there is no such file, nor a model.safetensors.index.json beside "
            "it");
  testing::WriteBytes(Path("pytorch_model.bin"), "pickle");
  EXPECT_THAT(Fault(absl::StatusCode::kNotFound),
              HasSubstr("convert the folder with python -m mambascope.convert"));
  EXPECT_EQ(Checkpoint::Open("/no/such/folder").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointFolder, AMissingShardIsNamed) {
  WriteShards();
  std::filesystem::remove(Path(kSecond));
  EXPECT_EQ(Fault(absl::StatusCode::kNotFound),
            std::string(kSecond) +
                ": cannot be opened: No such file or directory "
                "(model.safetensors.index.json places tensors in it)");
  std::filesystem::create_directory(Path(kSecond));
  EXPECT_EQ(Fault(), std::string(kSecond) + ": is not a regular file");
}

TEST_F(CheckpointFolder, AShardLiesInItsOwnFolder) {
  WriteShards();
  for (const std::string name : {"/etc/passwd", "../x.safetensors", "sub/x.safetensors", "..", "",
                                 "x..safetensors", "config.json", "a\n.safetensors"}) {
    SCOPED_TRACE(name);
    WriteIndexOf({{"a", name}, {"b", kFirst}});
    const std::string fault = Fault();
    EXPECT_THAT(fault, HasSubstr("places tensor 'a' in '"));
    EXPECT_THAT(fault, HasSubstr("which is not the name of a .safetensors file in its own folder"));
  }
  WriteIndexOf({{"a", std::string("x.safetensors\0.safetensors", 26)}});  // open() would stop at 0
  EXPECT_THAT(Fault(), HasSubstr("which is not the name"));
  WriteIndexOf({{"a", 7}});
  EXPECT_THAT(Fault(), HasSubstr("places tensor 'a' in '7', which is not the name"));
}

TEST_F(CheckpointFolder, IndexAndShardsMustAgree) {
  WriteShards();
  const std::string index = "model.safetensors.index.json: ";
  WriteIndexOf({{"a", kSecond}, {"b", kFirst}, {"c", kSecond}, {"d", kSecond}});
  EXPECT_EQ(Fault(), index + "places tensor 'd' in '" + kSecond + "', which does not hold it");
  WriteIndexOf({{"a", kFirst}, {"b", kFirst}, {"c", kSecond}});
  EXPECT_EQ(Fault(), index + "places tensor 'a' in '" + kFirst + "', which does not hold it");
  WriteIndexOf({{"a", kSecond}, {"b", kFirst}});
  EXPECT_EQ(Fault(), index + "does not name tensor 'c' of '" + kSecond + "'");
  WriteIndexOf({{"a", kSecond}, {"b", kFirst}, {"c", kSecond}});
  Write(kFirst, {{"a", testing::StoreF32({1}, {1})}, {"b", testing::StoreF32({1}, {1})}});
  EXPECT_EQ(Fault(),
            index + "tensor 'a' lies in two files, '" + kFirst + "' and '" + kSecond + "'");
  testing::WriteBytes(Path(kFirst), "1234567");
  EXPECT_EQ(Fault(), std::string(kFirst) + ": has 7 bytes, too few for a safetensors file");
}

TEST_F(CheckpointFolder, AnIndexThatIsNoneIsRefused) {
  const std::string index = "model.safetensors.index.json: ";
  for (const std::string text : {"", "[]", "{", "7", "{} {}", "{\"weight_map\":1e999}"}) {
    SCOPED_TRACE(text);
    EXPECT_EQ(FaultOfIndex(text), index + "is not a JSON object");
  }
  for (const std::string text : {"{}", "{\"weight_map\":[]}", "{\"weight_map\":null}"}) {
    SCOPED_TRACE(text);
    EXPECT_EQ(FaultOfIndex(text), index + "has no object \"weight_map\"");
  }
  EXPECT_EQ(FaultOfIndex(std::string(1000000, '[')), index + "is nested more than 8 levels deep");
  EXPECT_EQ(FaultOfIndex("{\"weight_map\":{\"a\":\"x.safetensors\",\"a\":\"y.safetensors\"}}"),
            index + "names tensor 'a' twice");
  EXPECT_EQ(FaultOfIndex(std::string((16 << 20) + 1, ' ')), index + "has more than 16777216 bytes");
}

TEST_F(CheckpointFolder, TheNumberOfShardsIsBounded) {
  Json map;
  for (int i = 0; i <= 1000; ++i) {
    const std::string name = std::to_string(i);
    map[name] = name + ".safetensors";
  }
  WriteIndexOf(map);
  EXPECT_EQ(Fault(), "model.safetensors.index.json: names 1001 files; at most 1000 are supported");
}

}  // namespace
}  // namespace mambascope::model
