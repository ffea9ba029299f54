#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace mambascope::testing {

// Reads and writes safetensors files for tests, on its own: it shares no code with the server's
// reader. Throws on anything unexpected, which fails the test.

struct StoredTensor {
  std::string dtype;  // "F32", "F64", "I32", "BF16", ...
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;

  int64_t size() const {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    return count;
  }
};

using StoredTensors = std::map<std::string, StoredTensor>;

inline std::string ReadBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A new file in place of an old one: who has mapped the old one keeps it.
inline void WriteBytes(const std::string& path, const std::string& bytes) {
  std::filesystem::remove(path);
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

inline StoredTensors ReadSafetensors(const std::string& path) {
  const std::string file = ReadBytes(path);
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), 8);
  const auto header = nlohmann::json::parse(file.substr(8, header_bytes));
  StoredTensors tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto offsets = entry.at("data_offsets").get<std::vector<uint64_t>>();
    const std::string bytes =
        file.substr(8 + header_bytes + offsets.at(0), offsets.at(1) - offsets.at(0));
    tensors[name] = {entry.at("dtype"), entry.at("shape"), {bytes.begin(), bytes.end()}};
  }
  return tensors;
}

// A file of any header, sound or not.
inline std::string SafetensorsBytes(std::string header, const std::string& data) {
  const uint64_t length = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + data;
}

// `shift` moves the data that many bytes off the 8-byte boundary on which it otherwise begins.
inline void WriteSafetensors(const std::string& path, const StoredTensors& tensors, int shift = 0) {
  nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data.append(tensor.bytes.begin(), tensor.bytes.end());
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8 + shift, ' ');
  WriteBytes(path, SafetensorsBytes(text, data));
}

// The numbers of a tensor whose stored type is exactly T's.
template <typename T>
std::vector<T> ValuesAs(const StoredTensor& tensor, const char* dtype) {
  if (tensor.dtype != dtype) throw std::runtime_error("stored as " + tensor.dtype);
  std::vector<T> values(tensor.bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), values.size() * sizeof(T));
  return values;
}
inline std::vector<double> F64(const StoredTensor& tensor) {
  return ValuesAs<double>(tensor, "F64");
}
inline std::vector<float> F32(const StoredTensor& tensor) { return ValuesAs<float>(tensor, "F32"); }
inline std::vector<int32_t> I32(const StoredTensor& tensor) {
  return ValuesAs<int32_t>(tensor, "I32");
}

template <typename T>
StoredTensor Store(const char* dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  StoredTensor tensor{dtype, std::move(shape), {}};
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  tensor.bytes.assign(bytes, bytes + values.size() * sizeof(T));
  if (tensor.size() != static_cast<int64_t>(values.size())) throw std::runtime_error("shape");
  return tensor;
}
inline StoredTensor StoreF32(std::vector<int64_t> shape, const std::vector<float>& values) {
  return Store("F32", std::move(shape), values);
}

}  // namespace mambascope::testing
