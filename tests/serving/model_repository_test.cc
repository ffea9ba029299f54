#include "server/serving/model_repository.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "server/observe/log.h"

namespace mambascope::serving {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

const std::string kRoot = MAMBASCOPE_SOURCE_DIR;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    char name[] = "/tmp/mambascope_test_XXXXXX";
    path_ = mkdtemp(name);
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  fs::path operator/(const std::string& name) const { return path_ / name; }
  std::string string() const { return path_; }

 private:
  fs::path path_;
};

void CopyTiny(const fs::path& folder) {
  fs::create_directories(folder);
  for (const char* name : {"config.json", "model.safetensors"}) {
    fs::copy_file(fs::path(kRoot) / "tests/golden/mamba1-tiny" / name, folder / name);
  }
}

std::string Failure(const std::vector<std::string>& models, const std::string& repository = "") {
  const auto loaded = ModelRepository::Load(models, repository);
  EXPECT_FALSE(loaded.ok());
  return std::string(loaded.status().message());
}

TEST(ParseModelSource, NamesAFolderByItselfOrByItsParent) {
  EXPECT_EQ(ParseModelSource("a=/x/y")->name, "a");
  EXPECT_EQ(ParseModelSource("a=/x/y")->version, "1");
  EXPECT_EQ(ParseModelSource("/x/atlas/3")->name, "atlas");
  EXPECT_EQ(ParseModelSource("/x/atlas/3/")->version, "3");
  EXPECT_EQ(ParseModelSource("x/tiny/")->name, "tiny");
  for (const char* bad : {"", "=", "a=", "a b=/x", "=/x", "a@1=/x"}) {
    EXPECT_FALSE(ParseModelSource(bad).ok()) << bad;
  }
}

TEST(ModelRepository, ServesTheNewestVersionUnlessOneIsNamed) {
  TemporaryFolder folder;
  for (const char* version : {"2", "10", "9"}) CopyTiny(folder / "m" / version);
  const auto repository = ModelRepository::Load({}, folder.string());
  ASSERT_TRUE(repository.ok()) << repository.status();
  EXPECT_EQ((*(*repository)->Find("m"))->version, "10");
  EXPECT_EQ((*(*repository)->Find("m@2"))->version, "2");
  const auto missing = (*repository)->Find("m@3");
  EXPECT_TRUE(absl::IsNotFound(missing.status()));
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("m@10, m@9, m@2"));
}

TEST(ModelRepository, SaysWhatIsWrongWithAFolder) {
  TemporaryFolder folder;
  EXPECT_THAT(Failure({}), HasSubstr("--model"));
  EXPECT_THAT(Failure({}, folder.string()), HasSubstr("<model>/<version>/"));
  EXPECT_THAT(Failure({}, (folder / "none").string()), HasSubstr("none"));
  EXPECT_THAT(Failure({"m=" + (folder / "none").string()}), HasSubstr("model 'm'"));
  CopyTiny(folder / "twice");
  const std::string twice = "t=" + (folder / "twice").string();
  EXPECT_THAT(Failure({twice, twice}), HasSubstr("given twice"));
  CopyTiny(folder / "broken");
  fs::resize_file(folder / "broken" / "model.safetensors", 1000);
  EXPECT_THAT(Failure({"b=" + (folder / "broken").string()}), HasSubstr("model.safetensors"));
  CopyTiny(folder / "words");
  std::ofstream(folder / "words" / "tokenizer.json") << "{";
  EXPECT_THAT(Failure({"w=" + (folder / "words").string()}), HasSubstr("tokenizer.json"));
}

TEST(ModelRepository, AModelThatFailsIsListedAndHarmsNoOther) {
  observe::SetLogLevel(observe::LogLevel::kOff);
  TemporaryFolder folder;
  CopyTiny(folder / "m" / "1");
  CopyTiny(folder / "m" / "2");
  fs::resize_file(folder / "m" / "2" / "model.safetensors", 1000);
  CopyTiny(folder / "broken" / "1");
  std::ofstream(folder / "broken" / "1" / "config.json") << "{}";
  const auto repository = ModelRepository::Load({}, folder.string());
  ASSERT_TRUE(repository.ok()) << repository.status();
  EXPECT_EQ((*(*repository)->Find("m"))->version, "1") << "the newest that works";
  ASSERT_EQ((*repository)->failed().size(), 2u);
  for (const char* name : {"broken", "broken@1", "m@2"}) {
    const absl::Status status = (*repository)->Find(name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr(folder.string())));
  }
  EXPECT_THAT(std::string((*repository)->Find("broken").status().message()),
              HasSubstr("config.json: model_type: is missing"));
}

TEST(ModelRepository, AVocabularySmallerThanTheTokenizerIsRefused) {
  TemporaryFolder folder;
  CopyTiny(folder / "m");
  fs::copy_file(fs::path(kRoot) / "deploy/models/atlas-mamba/1/tokenizer.json",
                folder / "m" / "tokenizer.json");
  EXPECT_THAT(Failure({"m=" + (folder / "m").string()}),
              HasSubstr("exceed the model's vocab_size 101"));
}

}  // namespace
}  // namespace mambascope::serving
