#include "client/cli/safetensors_writer.h"

#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/tensor_values.h"
#include "server/base/status.h"

namespace mambascope::cli {
namespace {

constexpr char kMetadata[] = "__metadata__";

std::string WhyNot(const std::string& path) {
  return absl::StrCat("cannot write ", path, ": ", std::strerror(errno));
}

absl::Status Claim(const std::string& name, const Tensor& tensor, NamedTensors* tensors) {
  if (name == kMetadata || !tensors->emplace(name, &tensor).second) {
    return absl::AlreadyExistsError(
        absl::StrCat("two things would be named '", name, "' in the file: choose another id"));
  }
  return absl::OkStatus();
}

// Four bytes a value, one after the other: as they are in the file.
bool TravelsAsWritten(const v1::TensorInfo& info) {
  return info.encoding() != v1::ENCODING_SPARSE_ROWS &&
         (info.dtype() == v1::DATA_TYPE_FP32 || info.dtype() == v1::DATA_TYPE_INT32);
}

// Filled up with spaces to a multiple of 8.
std::string Header(const std::map<std::string, std::string>& metadata,
                   const NamedTensors& tensors) {
  nlohmann::json header = {{kMetadata, metadata}};
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    nlohmann::json shape = nlohmann::json::array();
    for (const auto& axis : tensor->info.axes()) shape.push_back(axis.size());
    const int64_t bytes = sizeof(float) * SizeOfLast(tensor->info, tensor->info.axes_size());
    header[name] = {{"dtype", tensor->info.dtype() == v1::DATA_TYPE_INT32 ? "I32" : "F32"},
                    {"shape", std::move(shape)},
                    {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

}  // namespace

absl::StatusOr<NamedTensors> TensorsForFile(const Answer& answer) {
  NamedTensors tensors;
  for (const Tensor& tensor : answer.tensors().tensors()) {
    RETURN_IF_ERROR(Claim(tensor.info.name(), tensor, &tensors));
  }
  for (const ExplanationAnswer& explanation : answer.explanations()) {
    if (!explanation.succeeded()) continue;
    const std::string& id = explanation.started.explanation_id();
    const std::vector<Tensor>& all = explanation.tensors.tensors();
    for (size_t i = 0; i < all.size(); ++i) {
      RETURN_IF_ERROR(
          Claim(i == 0 ? id : absl::StrCat(id, "/", all[i].info.name()), all[i], &tensors));
    }
  }
  return tensors;
}

SafetensorsFile::SafetensorsFile(std::string path, std::string temporary, std::FILE* file)
    : path_(std::move(path)), temporary_(std::move(temporary)), file_(file) {}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      file_(std::exchange(other.file_, nullptr)) {}

SafetensorsFile::~SafetensorsFile() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  unlink(temporary_.c_str());
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Create(const std::string& path) {
  std::string temporary = absl::StrCat(path, ".XXXXXX");
  struct stat status;
  // The rename at the end would put a file in place of a device, a pipe or a link.
  if (lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    errno = S_ISDIR(status.st_mode) ? EISDIR : EEXIST;
    return absl::InvalidArgumentError(
        S_ISDIR(status.st_mode) ? WhyNot(path)
                                : absl::StrCat("'", path, "' is there and is no regular file"));
  }
  const int descriptor = mkstemp(temporary.data());
  if (descriptor < 0) return absl::InvalidArgumentError(WhyNot(path));
  // mkstemp makes files for their owner alone; this one is as public as any other that the user
  // makes.
  const mode_t mask = umask(0);
  umask(mask);
  std::FILE* file = fchmod(descriptor, 0666 & ~mask) == 0 ? fdopen(descriptor, "wb") : nullptr;
  if (file == nullptr) {
    absl::Status error = absl::InvalidArgumentError(WhyNot(path));
    close(descriptor);
    unlink(temporary.c_str());
    return error;
  }
  return SafetensorsFile(path, std::move(temporary), file);
}

bool SafetensorsFile::Put(absl::string_view bytes) {
  return std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size();
}

absl::Status SafetensorsFile::PutTensor(const Tensor& tensor) {
  bool written = true;
  if (TravelsAsWritten(tensor.info)) {
    written = Put(tensor.bytes);
  } else {
    ASSIGN_OR_RETURN(const std::vector<float> values, Floats(tensor));
    written = Put({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
  }
  return written ? absl::OkStatus() : absl::UnavailableError(WhyNot(path_));
}

absl::Status SafetensorsFile::Write(const std::map<std::string, std::string>& metadata,
                                    const NamedTensors& tensors) {
  const std::string header = Header(metadata, tensors);
  static_assert(std::endian::native == std::endian::little);
  const uint64_t length = header.size();
  if (!Put({reinterpret_cast<const char*>(&length), sizeof(length)}) || !Put(header)) {
    return absl::UnavailableError(WhyNot(path_));
  }
  for (const auto& [name, tensor] : tensors) RETURN_IF_ERROR(PutTensor(*tensor));
  // Flushed to the disk before the rename: otherwise a crash could leave an empty file under the
  // name.
  const bool written = std::fflush(file_) == 0 && fsync(fileno(file_)) == 0 &&
                       std::rename(temporary_.c_str(), path_.c_str()) == 0;
  if (!written) return absl::UnavailableError(WhyNot(path_));
  std::fclose(std::exchange(file_, nullptr));
  return absl::OkStatus();
}

}  // namespace mambascope::cli
