#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace mambascope::model {

enum class DType { kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU8, kBool };
size_t ByteSize(DType dtype);
absl::string_view Name(DType dtype);  // as the format spells it: "F32"

struct TensorView {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // row-major, little-endian, inside the mapped file
};

// A memory-mapped safetensors file (8-byte little-endian header length, JSON header, data). Every
// fact of the header is checked before it is believed: its length, the JSON, dtypes, shapes against
// byte ranges, offsets inside the file, no overlaps and no gaps. Views live as long as the file.
// Threads: const after Open.
class SafetensorsFile {
 public:
  // kNotFound / kInvalidArgument name the file and the fault.
  static absl::StatusOr<std::unique_ptr<const SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();

  const TensorView* Find(absl::string_view name) const;  // null if there is none
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  std::span<const std::byte> file() const { return file_; }  // all of it, for digests
  const std::string& path() const { return path_; }

 private:
  SafetensorsFile() = default;

  std::string path_;
  std::span<const std::byte> file_;
  std::map<std::string, TensorView, std::less<>> tensors_;
};

}  // namespace mambascope::model
