#include "client/cli/safetensors_writer.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace mambascope::cli {
namespace {

class SafetensorsFileTest : public testing::Test {
 protected:
  SafetensorsFileTest() { std::filesystem::create_directories(folder_); }
  ~SafetensorsFileTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  size_t Files() const { return std::distance(std::filesystem::directory_iterator(folder_), {}); }

 private:
  const std::string folder_ =
      absl::StrCat(testing::TempDir(), "safetensors_writer_test_", getpid(), "_",
                   testing::UnitTest::GetInstance()->current_test_info()->name());
};

struct Parsed {
  nlohmann::json header;
  std::string data;
};

Parsed Parse(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  uint64_t length = 0;
  EXPECT_GE(bytes.size(), sizeof(length));
  std::memcpy(&length, bytes.data(), sizeof(length));
  EXPECT_EQ(length % 8, 0);
  return {nlohmann::json::parse(bytes.substr(8, length)), bytes.substr(8 + length)};
}

Tensor Make(v1::DataType dtype, std::initializer_list<int64_t> shape, const std::string& bytes) {
  Tensor tensor;
  tensor.info.set_dtype(dtype);
  for (const int64_t size : shape) tensor.info.add_axes()->set_size(size);
  tensor.bytes = bytes;
  return tensor;
}

std::string Floats32(std::initializer_list<float> values) {
  return {reinterpret_cast<const char*>(std::data(values)), values.size() * sizeof(float)};
}

TEST_F(SafetensorsFileTest, HoldsNamesShapesMetadataAndBytes) {
  const Tensor map = Make(v1::DATA_TYPE_FP32, {1, 2}, Floats32({1.5f, -2.0f}));
  const Tensor indices = Make(v1::DATA_TYPE_INT32, {1}, std::string("\x07\0\0\0", 4));
  auto file = SafetensorsFile::Create(Path("a.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(file->Write({{"model", "m\u00fc"}, {"version", "3"}},
                          {{"map", &map}, {"map/indices", &indices}})
                  .ok());
  const Parsed parsed = Parse(Path("a.safetensors"));
  EXPECT_EQ(parsed.header["__metadata__"],
            (nlohmann::json{{"model", "m\u00fc"}, {"version", "3"}}));
  EXPECT_EQ(parsed.header["map"],
            (nlohmann::json{{"dtype", "F32"}, {"shape", {1, 2}}, {"data_offsets", {0, 8}}}));
  EXPECT_EQ(parsed.header["map/indices"],
            (nlohmann::json{{"dtype", "I32"}, {"shape", {1}}, {"data_offsets", {8, 12}}}));
  EXPECT_EQ(parsed.data, Floats32({1.5f, -2.0f}) + std::string("\x07\0\0\0", 4));
}

TEST_F(SafetensorsFileTest, WidensHalvesToFloats) {
  const Tensor half = Make(v1::DATA_TYPE_FP16, {2}, std::string("\x00\x3c\x00\xc0", 4));
  auto file = SafetensorsFile::Create(Path("h.safetensors"));
  ASSERT_TRUE(file->Write({}, {{"half", &half}}).ok());
  const Parsed parsed = Parse(Path("h.safetensors"));
  EXPECT_EQ(parsed.header["half"]["dtype"], "F32");
  EXPECT_EQ(parsed.header["half"]["data_offsets"], (nlohmann::json{0, 8}));
  EXPECT_EQ(parsed.data, Floats32({1.0f, -2.0f}));
}

TEST_F(SafetensorsFileTest, WritesBytesAndSparseRowsAsDenseFloats) {
  const Tensor bytes =
      Make(v1::DATA_TYPE_UINT8, {2}, Floats32({0.5f, 2}) + std::string("\0\x04", 2));
  Tensor sparse =
      Make(v1::DATA_TYPE_FP32, {2, 2},
           std::string("\x01\0\0\0\x01\0\0\0", 8) + Floats32({3}) + std::string(4, '\0'));
  sparse.info.set_encoding(v1::ENCODING_SPARSE_ROWS);
  auto file = SafetensorsFile::Create(Path("d.safetensors"));
  ASSERT_TRUE(file->Write({}, {{"a", &bytes}, {"b", &sparse}}).ok());
  const Parsed parsed = Parse(Path("d.safetensors"));
  EXPECT_EQ(parsed.header["b"]["dtype"], "F32");
  EXPECT_EQ(parsed.header["b"]["data_offsets"], (nlohmann::json{8, 24}));
  EXPECT_EQ(parsed.data, Floats32({-1, 1, 0, 3, 0, 0}));
}

TEST_F(SafetensorsFileTest, NothingIsLeftWithoutAWrite) {
  { auto file = SafetensorsFile::Create(Path("never.safetensors")); }
  EXPECT_EQ(Files(), 0);
}

TEST_F(SafetensorsFileTest, APipeOrALinkIsNotReplacedByAFile) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("elsewhere", Path("link"));
  for (const char* name : {"pipe", "link"}) {
    EXPECT_FALSE(SafetensorsFile::Create(Path(name)).ok()) << name;
  }
  EXPECT_TRUE(std::filesystem::is_fifo(Path("pipe")));
  EXPECT_EQ(Files(), 2u);
}

TEST_F(SafetensorsFileTest, TheOldFileStaysUntilTheNewOneIsWhole) {
  std::ofstream(Path("a.safetensors")) << "old";
  auto file = SafetensorsFile::Create(Path("a.safetensors"));
  EXPECT_EQ(std::filesystem::file_size(Path("a.safetensors")), 3);
  ASSERT_TRUE(file->Write({}, {}).ok());
  EXPECT_TRUE(Parse(Path("a.safetensors")).data.empty());
  EXPECT_EQ(Files(), 1);
}

TEST_F(SafetensorsFileTest, IsReadableAsTheUserSMaskSays) {
  const mode_t mask = umask(022);
  auto file = SafetensorsFile::Create(Path("a.safetensors"));
  umask(mask);
  ASSERT_TRUE(file->Write({}, {}).ok());
  struct stat status;
  ASSERT_EQ(stat(Path("a.safetensors").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0644);
}

TEST_F(SafetensorsFileTest, AFolderThatIsNotThereIsKnownBeforeAnyWork) {
  EXPECT_EQ(SafetensorsFile::Create(Path("none/a.safetensors")).status().code(),
            absl::StatusCode::kInvalidArgument);
  std::filesystem::create_directory(Path("folder"));
  EXPECT_EQ(SafetensorsFile::Create(Path("folder")).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// An answer whose prediction has `logits`, and an explanation of that id with tensors "main",
// "extra".
Answer AnswerWith(const std::string& id) {
  Answer answer(/*keep_tensors=*/true);
  v1::PredictEvent event;
  auto add = [](auto* infos, const std::string& name) {
    auto* info = infos->Add();
    info->set_name(name);
    info->set_dtype(v1::DATA_TYPE_FP32);
    info->add_axes()->set_size(0);
  };
  add(event.mutable_started()->mutable_tensors(), "logits");
  EXPECT_TRUE(answer.Add(event).ok());
  event.mutable_explanation_started()->set_explanation_id(id);
  add(event.mutable_explanation_started()->mutable_tensors(), "main");
  add(event.mutable_explanation_started()->mutable_tensors(), "extra");
  EXPECT_TRUE(answer.Add(event).ok());
  event.mutable_explanation_finished()->set_explanation_id(id);
  for (const char* tensor : {"main", "extra"}) {
    auto* digest = event.mutable_explanation_finished()->add_digests();
    digest->set_tensor(tensor);
    digest->set_sha256(
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");  // of nothing
  }
  EXPECT_TRUE(answer.Add(event).ok());
  return answer;
}

TEST(TensorsForFile, NamesTheMainTensorByTheIdAndOthersBelowIt) {
  const Answer answer = AnswerWith("map");
  const auto tensors = TensorsForFile(answer);
  ASSERT_TRUE(tensors.ok());
  ASSERT_EQ(tensors->size(), 3);
  EXPECT_EQ(tensors->at("map")->info.name(), "main");
  EXPECT_EQ(tensors->at("map/extra")->info.name(), "extra");
  EXPECT_EQ(tensors->at("logits")->info.name(), "logits");
}

TEST(TensorsForFile, RefusesAnIdThatIsTaken) {
  for (const char* id : {"logits", "__metadata__"}) {
    const Answer answer = AnswerWith(id);
    EXPECT_EQ(TensorsForFile(answer).status().code(), absl::StatusCode::kAlreadyExists) << id;
  }
}

}  // namespace
}  // namespace mambascope::cli
