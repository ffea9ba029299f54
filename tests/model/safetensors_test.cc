#include "server/model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <span>
#include <string>

#include "tests/support/safetensors_io.h"

namespace mambascope::model {
namespace {

using ::testing::HasSubstr;
using testing::SafetensorsBytes;

class Safetensors : public ::testing::Test {
 protected:
  // One file for each test: they may run side by side.
  std::string Path() const {
    return ::testing::TempDir() + "/safetensors_" +
           ::testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  absl::StatusOr<std::unique_ptr<const SafetensorsFile>> Open(const std::string& bytes) const {
    testing::WriteBytes(Path(), bytes);
    return SafetensorsFile::Open(Path());
  }
  std::string FaultOf(const std::string& bytes) const {
    const auto file = Open(bytes);
    if (file.ok()) return "accepted";
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message(file.status().message());
    EXPECT_EQ(message.find(Path() + ": "), 0u) << message;
    return message.substr(Path().size() + 2);
  }
  std::string FaultOfHeader(const std::string& header, size_t data_bytes = 8) const {
    return FaultOf(SafetensorsBytes(header, std::string(data_bytes, '\0')));
  }
  ~Safetensors() override { std::filesystem::remove(Path()); }
};

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

TEST_F(Safetensors, GivesEveryTensorAsItWasWritten) {
  const testing::StoredTensors written = {
      {"matrix", testing::StoreF32({2, 3}, {1, 2, 3, 4, 5, 6})},
      {"scalar", testing::StoreF32({}, {7})},
      {"nothing", testing::StoreF32({0, 4}, {})},
      {"ids", testing::Store<int32_t>("I32", {2}, {8, -9})},
      {"exact", testing::Store<double>("F64", {1}, {0.1})},
  };
  testing::WriteSafetensors(Path(), written);
  const auto file = SafetensorsFile::Open(Path());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->tensors().size(), written.size()) << "__metadata__ is not a tensor";
  EXPECT_EQ((*file)->file().size(), std::filesystem::file_size(Path()));
  for (const auto& [name, tensor] : written) {
    SCOPED_TRACE(name);
    const TensorView* view = (*file)->Find(name);
    ASSERT_NE(view, nullptr);
    EXPECT_EQ(Name(view->dtype), tensor.dtype);
    EXPECT_EQ(view->shape, tensor.shape);
    EXPECT_TRUE(std::ranges::equal(view->bytes, std::as_bytes(std::span(tensor.bytes))));
  }
  EXPECT_EQ((*file)->Find("other"), nullptr);
}

TEST_F(Safetensors, AMissingFileIsNotFound) {
  for (const std::string& path : {std::string("/no/such/folder/model.safetensors"), Path() + "x"}) {
    const auto file = SafetensorsFile::Open(path);
    EXPECT_EQ(file.status().code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(path));
  }
  const auto folder = SafetensorsFile::Open(::testing::TempDir());
  EXPECT_EQ(folder.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(folder.status().message()), HasSubstr("is not a regular file"));
}

TEST_F(Safetensors, AHeaderLengthIsCheckedBeforeItIsBelieved) {
  EXPECT_EQ(FaultOf(""), "has 0 bytes, too few for a safetensors file");
  EXPECT_EQ(FaultOf("1234567"), "has 7 bytes, too few for a safetensors file");
  EXPECT_THAT(FaultOf(std::string(8, '\xff') + "{}"), HasSubstr("18446744073709551615 bytes"));
  EXPECT_THAT(FaultOf(std::string("\3\0\0\0\0\0\0\0{}", 10)), HasSubstr("has 3 bytes"));
}

TEST_F(Safetensors, AHeaderThatIsNoObjectIsRefused) {
  for (const std::string header : {"", "[]", "{", "7", "{} {}", "\"\xff\"", "{\"a\":1e999}"}) {
    SCOPED_TRACE(header);
    EXPECT_EQ(FaultOfHeader(header, 0), "the header is not a JSON object");
  }
  EXPECT_EQ(FaultOfHeader(std::string(1000000, '['), 0), "the header is nested too deep");
}

TEST_F(Safetensors, EveryFaultOfAnEntryNamesItsTensor) {
  const struct {
    std::string entry, fault;
  } cases[] = {
      {"\"t\":3", "tensor 't' is not an object"},
      {"\"t\":{}", "tensor 't' has no dtype"},
      {Entry("t", "F33", "[2]", "[0,8]"), "tensor 't' has unknown dtype 'F33'"},
      {Entry("t", "F32", "2", "[0,8]"), "tensor 't' has no shape"},
      {Entry("t", "F32", "[-2]", "[0,8]"),
       "tensor 't' has a dimension that is not a non-negative integer"},
      {Entry("t", "F32", "[2.0]", "[0,8]"),
       "tensor 't' has a dimension that is not a non-negative integer"},
      {Entry("t", "F32", "[18446744073709551615]", "[0,8]"),
       "tensor 't' has a dimension that is not a non-negative integer"},
      {Entry("t", "F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]"),
       "tensor 't' has 9 dimensions; at most 8 are supported"},
      {Entry("t", "F32", "[2]", "[0]"), "tensor 't' has no data_offsets"},
      {Entry("t", "F32", "[2]", "[0,\"8\"]"),
       "tensor 't' has data_offsets that are not non-negative integers"},
      {Entry("t", "F32", "[2]", "[8,0]"), "tensor 't' has reversed data_offsets [8, 0]"},
      {Entry("t", "F32", "[4]", "[0,16]"),
       "tensor 't' ends at byte 16 of the data, which has 8 bytes (is the file truncated?)"},
      {Entry("t", "F32", "[3]", "[0,8]"),
       "tensor 't' has 8 bytes, but its dtype and shape need 12"},
      {Entry("t", "BF16", "[2]", "[0,8]"),
       "tensor 't' has 8 bytes, but its dtype and shape need 4"},
      // 2^62 x 2 x 4 is 2^65: as 64 bits it would be 0 and fit anywhere.
      {Entry("t", "F32", "[4611686018427387904,2]", "[0,0]"),
       "tensor 't' has a shape too large for any file"},
      {Entry("a\\u0007\\n", "F32", "[3]", "[0,8]"),
       "tensor 'a\\x07\\n' has 8 bytes, but its dtype and shape need 12"},
  };
  for (const auto& [entry, fault] : cases) {
    SCOPED_TRACE(entry);
    EXPECT_EQ(FaultOfHeader("{" + entry + "}"), fault);
  }
}

TEST_F(Safetensors, TensorsMustCoverTheDataOnce) {
  const std::string first = Entry("a", "F32", "[1]", "[0,4]");
  EXPECT_EQ(FaultOfHeader("{" + first + "," + Entry("b", "F32", "[1]", "[4,8]") + "}"), "accepted");
  EXPECT_EQ(FaultOfHeader("{" + first + "," + Entry("b", "I16", "[3]", "[2,8]") + "}"),
            "tensors 'a' and 'b' overlap");
  EXPECT_EQ(FaultOfHeader("{" + Entry("b", "F32", "[1]", "[4,8]") + "}"),
            "bytes [0, 4) of the data belong to no tensor");
  EXPECT_EQ(FaultOfHeader("{" + first + "}"), "bytes [4, 8) of the data belong to no tensor");
  EXPECT_EQ(FaultOfHeader("{}"), "bytes [0, 8) of the data belong to no tensor");
  EXPECT_EQ(FaultOfHeader("{}", 0), "accepted");
  EXPECT_EQ(FaultOfHeader("{" + first + "," + Entry("a", "F32", "[1]", "[4,8]") + "}"),
            "two tensors are named 'a'");
}

TEST_F(Safetensors, ATruncatedFileIsRefusedAtEveryLength) {
  testing::WriteSafetensors(Path(), {{"a", testing::StoreF32({3}, {1, 2, 3})}});
  const std::string whole = testing::ReadBytes(Path());
  for (size_t length = 0; length < whole.size(); ++length) {
    SCOPED_TRACE(length);
    EXPECT_NE(FaultOf(whole.substr(0, length)), "accepted");
  }
  EXPECT_EQ(FaultOf(whole), "accepted");
  EXPECT_EQ(FaultOf(whole + "x"), "bytes [12, 13) of the data belong to no tensor");
}

TEST_F(Safetensors, NoBytesCrashIt) {
  testing::WriteSafetensors(Path(), {{"a", testing::StoreF32({2, 3}, {1, 2, 3, 4, 5, 6})},
                                     {"b", testing::Store<int16_t>("BF16", {4}, {1, 2, 3, 4})},
                                     {"c", testing::StoreF32({0}, {})}});
  const std::string sound = testing::ReadBytes(Path());
  int accepted = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    std::string bytes = sound;
    for (uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      const size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes[at] = "0123456789-.\"{}[]:,"[random() % 19];
          break;
        case 2:
          bytes.resize(at + 1);
          break;
        case 3:
          bytes[random() % 8] ^= static_cast<char>(1 << random() % 8);
          break;
      }
    }
    const auto file = Open(bytes);
    if (!file.ok()) continue;
    ++accepted;
    uint64_t sum = 0;  // every view must be readable to its end
    for (const auto& [name, view] : (*file)->tensors()) {
      for (const std::byte byte : view.bytes) sum += std::to_integer<uint64_t>(byte);
    }
    EXPECT_LE(sum, 255 * (*file)->file().size());
  }
  EXPECT_GT(accepted, 0);  // a change inside the data
  EXPECT_LT(accepted, 2000);
}

}  // namespace
}  // namespace mambascope::model
