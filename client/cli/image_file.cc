#include "client/cli/image_file.h"

#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/status.h"

namespace mambascope::cli {
namespace {

using Json = nlohmann::json;

// What a server takes in one request, unless it was told otherwise.
constexpr size_t kMostBytes = 16 << 20;

absl::Status Fault(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("--image: ", path, ": ", what));
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Fault(path, "cannot be opened");
  std::string bytes(kMostBytes + 1, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (file.bad()) return Fault(path, "cannot be read");
  bytes.resize(static_cast<size_t>(file.gcount()));
  if (bytes.empty()) return Fault(path, "is empty, or no file");
  if (bytes.size() > kMostBytes) {
    return Fault(path, absl::StrCat("has more than ", kMostBytes, " bytes"));
  }
  return bytes;
}

absl::StatusOr<v1::Image> ReadTensor(const std::string& path, const std::string& bytes) {
  uint64_t length = 0;
  if (bytes.size() < sizeof(length)) return Fault(path, "is no safetensors file");
  std::memcpy(&length, bytes.data(), sizeof(length));
  if (length > bytes.size() - sizeof(length)) return Fault(path, "is no safetensors file");
  const char* header = bytes.data() + sizeof(length);
  Json json = Json::parse(header, header + length, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Fault(path, "is no safetensors file");
  json.erase("__metadata__");
  if (json.size() != 1) {
    return Fault(path, absl::StrCat("holds ", json.size(), " tensors; exactly one is needed"));
  }
  const Json& tensor = *json.begin();
  const Json dtype = tensor.is_object() ? tensor.value("dtype", Json()) : Json();
  const Json shape_json = tensor.is_object() ? tensor.value("shape", Json()) : Json();
  std::vector<int64_t> shape;
  for (const Json& size : shape_json) {
    shape.push_back(size.is_number_integer() ? size.get<int64_t>() : -1);
  }
  if (shape.size() == 4 && shape.front() == 1) shape.erase(shape.begin());
  if (dtype != "F32" || shape.size() != 3 || shape[0] != 3 || shape[1] < 1 || shape[2] < 1) {
    return Fault(path, absl::StrCat("holds ", dtype.dump(), " ", shape_json.dump(),
                                    "; F32 [3, height, width] is needed"));
  }
  const size_t values = bytes.size() - sizeof(length) - length;
  if (shape[1] > 1 << 16 || shape[2] > 1 << 16 ||
      values != static_cast<size_t>(4 * 3 * shape[1] * shape[2])) {
    return Fault(path, "has more or fewer bytes than its tensor");
  }
  v1::Image image;
  image.mutable_tensor()->set_height(static_cast<int32_t>(shape[1]));
  image.mutable_tensor()->set_width(static_cast<int32_t>(shape[2]));
  image.mutable_tensor()->set_values(bytes.substr(sizeof(length) + length));
  return image;
}

}  // namespace

absl::StatusOr<v1::Image> ReadImageFile(const std::string& path) {
  ASSIGN_OR_RETURN(std::string bytes, ReadFile(path));
  if (absl::EndsWith(path, ".safetensors")) return ReadTensor(path, bytes);
  v1::Image image;
  image.set_encoded(std::move(bytes));
  return image;
}

}  // namespace mambascope::cli
