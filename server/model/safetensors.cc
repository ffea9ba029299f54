#include "server/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/base/status.h"

namespace mambascope::model {
namespace {

using Json = nlohmann::json;

constexpr struct {
  DType dtype;
  absl::string_view name;
  size_t bytes;
} kDTypes[] = {
    {DType::kF64, "F64", 8},   {DType::kF32, "F32", 4}, {DType::kF16, "F16", 2},
    {DType::kBF16, "BF16", 2}, {DType::kI64, "I64", 8}, {DType::kI32, "I32", 4},
    {DType::kI16, "I16", 2},   {DType::kI8, "I8", 1},   {DType::kU8, "U8", 1},
    {DType::kBool, "BOOL", 1},
};

constexpr uint64_t kLengthBytes = 8;
// The header of 1,024 layers is 2 MB; the parsed form takes some ten times the text.
constexpr uint64_t kMaxHeaderBytes = 16 << 20;
constexpr size_t kMaxDimensions = 8;
constexpr int kMaxDepth = 8;

std::string Quoted(absl::string_view name) {
  constexpr size_t kLongest = 200;
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(name.substr(0, kLongest)),
                      name.size() > kLongest ? "..." : "", "'");
}

std::optional<DType> DTypeNamed(absl::string_view name) {
  for (const auto& entry : kDTypes) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

std::optional<uint64_t> AsUnsigned(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  return value.get<uint64_t>();
}

// The size that dtype and shape ask for, or nothing when it does not fit into 63 bits.
std::optional<uint64_t> SizeOf(const TensorView& tensor) {
  uint64_t bytes = ByteSize(tensor.dtype);
  for (const int64_t extent : tensor.shape) {
    uint64_t product;
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &product)) return std::nullopt;
    bytes = product;
  }
  if (bytes > INT64_MAX) return std::nullopt;
  return bytes;
}

struct Placed {
  TensorView tensor;
  uint64_t begin = 0, end = 0;  // of the data section
};

// Faults without the tensor's name: the caller adds it.
absl::StatusOr<Placed> ReadEntry(const Json& entry, std::span<const std::byte> data) {
  Placed placed;
  const auto fault = [](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat(parts...));
  };
  if (!entry.is_object()) return fault("is not an object");
  const auto dtype = entry.find("dtype"), shape = entry.find("shape"),
             offsets = entry.find("data_offsets");
  if (dtype == entry.end() || !dtype->is_string()) return fault("has no dtype");
  const std::string& dtype_name = dtype->get_ref<const std::string&>();
  const std::optional<DType> known = DTypeNamed(dtype_name);
  if (!known.has_value()) return fault("has unknown dtype ", Quoted(dtype_name));
  placed.tensor.dtype = *known;

  if (shape == entry.end() || !shape->is_array()) return fault("has no shape");
  if (shape->size() > kMaxDimensions) {
    return fault("has ", shape->size(), " dimensions; at most ", kMaxDimensions, " are supported");
  }
  for (const Json& extent : *shape) {
    const std::optional<uint64_t> value = AsUnsigned(extent);
    if (!value.has_value() || *value > INT64_MAX) {
      return fault("has a dimension that is not a non-negative integer");
    }
    placed.tensor.shape.push_back(static_cast<int64_t>(*value));
  }

  if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2) {
    return fault("has no data_offsets");
  }
  const std::optional<uint64_t> begin = AsUnsigned((*offsets)[0]), end = AsUnsigned((*offsets)[1]);
  if (!begin.has_value() || !end.has_value()) {
    return fault("has data_offsets that are not non-negative integers");
  }
  if (*begin > *end) return fault("has reversed data_offsets [", *begin, ", ", *end, "]");
  if (*end > data.size()) {
    return fault("ends at byte ", *end, " of the data, which has ", data.size(),
                 " bytes (is the file truncated?)");
  }
  const std::optional<uint64_t> size = SizeOf(placed.tensor);
  if (!size.has_value()) return fault("has a shape too large for any file");
  if (*size != *end - *begin) {
    return fault("has ", *end - *begin, " bytes, but its dtype and shape need ", *size);
  }
  placed.begin = *begin;
  placed.end = *end;
  placed.tensor.bytes = data.subspan(*begin, *size);
  return placed;
}

absl::StatusOr<Json> ParseHeader(std::span<const std::byte> text) {
  bool too_deep = false;
  std::string duplicate;
  std::set<std::string> names;
  const Json::parser_callback_t watch = [&](int depth, Json::parse_event_t event, Json& value) {
    too_deep |= depth > kMaxDepth;
    if (depth == 1 && event == Json::parse_event_t::key &&
        !names.insert(value.get<std::string>()).second) {
      duplicate = value.get<std::string>();  // the parsed object would keep the last in silence
    }
    return !too_deep;
  };
  const char* begin = reinterpret_cast<const char*>(text.data());
  Json header = Json::parse(begin, begin + text.size(), watch, /*allow_exceptions=*/false);
  if (too_deep) return absl::InvalidArgumentError("the header is nested too deep");
  if (!header.is_object()) return absl::InvalidArgumentError("the header is not a JSON object");
  if (!duplicate.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("two tensors are named ", Quoted(duplicate)));
  }
  return header;
}

absl::StatusOr<std::map<std::string, TensorView, std::less<>>> ReadTensors(
    std::span<const std::byte> file) {
  if (file.size() < kLengthBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", file.size(), " bytes, too few for a safetensors file"));
  }
  uint64_t header_bytes = 0;
  for (uint64_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= std::to_integer<uint64_t>(file[i]) << (8 * i);
  }
  if (header_bytes > kMaxHeaderBytes || header_bytes > file.size() - kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "says that its header has ", header_bytes, " bytes; the file has ",
        file.size() - kLengthBytes, " after the length and the limit is ", kMaxHeaderBytes));
  }
  ASSIGN_OR_RETURN(const Json header, ParseHeader(file.subspan(kLengthBytes, header_bytes)));
  const std::span<const std::byte> data = file.subspan(kLengthBytes + header_bytes);

  std::map<std::string, TensorView, std::less<>> tensors;
  struct Range {
    uint64_t begin, end;
    const std::string* name;
    auto operator<=>(const Range& other) const {
      return std::pair(begin, end) <=> std::pair(other.begin, other.end);
    }
  };
  std::vector<Range> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    absl::StatusOr<Placed> placed = ReadEntry(entry, data);
    if (!placed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Quoted(name), " ", placed.status().message()));
    }
    const auto [position, inserted] = tensors.emplace(name, std::move(placed->tensor));
    ranges.push_back({placed->begin, placed->end, &position->first});
  }

  std::sort(ranges.begin(), ranges.end());
  uint64_t covered = 0;
  const std::string* last = nullptr;
  for (const Range& range : ranges) {
    if (range.begin < covered) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensors ", Quoted(*last), " and ", Quoted(*range.name), " overlap"));
    }
    if (range.begin > covered) {
      return absl::InvalidArgumentError(
          absl::StrCat("bytes [", covered, ", ", range.begin, ") of the data belong to no tensor"));
    }
    covered = range.end;
    last = range.name;
  }
  if (covered != data.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes [", covered, ", ", data.size(), ") of the data belong to no tensor"));
  }
  return tensors;
}

// An open file, closed on every way out; the mapping outlives it.
class Descriptor {
 public:
  explicit Descriptor(const std::string& path)
      : number_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  const int number_;
};

absl::StatusOr<std::span<const std::byte>> Map(const std::string& path) {
  const Descriptor file(path);
  if (file.number() < 0) {
    const std::string message = absl::StrCat("cannot be opened: ", std::strerror(errno));
    return errno == ENOENT || errno == ENOTDIR ? absl::NotFoundError(message)
                                               : absl::InvalidArgumentError(message);
  }
  struct stat facts;
  if (::fstat(file.number(), &facts) != 0 || !S_ISREG(facts.st_mode)) {
    return absl::InvalidArgumentError("is not a regular file");
  }
  const auto size = static_cast<size_t>(facts.st_size);
  if (size == 0) return std::span<const std::byte>();  // which mmap refuses
  void* memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number(), 0);
  if (memory == MAP_FAILED) {
    return absl::InvalidArgumentError(absl::StrCat("cannot be mapped: ", std::strerror(errno)));
  }
  ::madvise(memory, size, MADV_WILLNEED);  // all of it is about to be read, for the digest
  return std::span(static_cast<const std::byte*>(memory), size);
}

}  // namespace

size_t ByteSize(DType dtype) {
  for (const auto& entry : kDTypes) {
    if (entry.dtype == dtype) return entry.bytes;
  }
  return 0;
}

absl::string_view Name(DType dtype) {
  for (const auto& entry : kDTypes) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "?";
}

absl::StatusOr<std::unique_ptr<const SafetensorsFile>> SafetensorsFile::Open(
    const std::string& path) {
  const auto named = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
  };
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->path_ = path;
  const absl::StatusOr<std::span<const std::byte>> mapped = Map(path);
  if (!mapped.ok()) return named(mapped.status());
  file->file_ = *mapped;  // unmapped by the destructor from here on
  auto tensors = ReadTensors(file->file_);
  if (!tensors.ok()) return named(tensors.status());
  file->tensors_ = *std::move(tensors);
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (!file_.empty()) ::munmap(const_cast<std::byte*>(file_.data()), file_.size());
}

const TensorView* SafetensorsFile::Find(absl::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

}  // namespace mambascope::model
