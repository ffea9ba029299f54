#include "server/model/config_file.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace mambascope::model {

absl::StatusOr<std::string> ReadConfigFile(const std::string& path, size_t most_bytes) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return absl::NotFoundError(absl::StrCat(path, ": there is no such file"));
  }
  if (!std::filesystem::is_regular_file(path, error)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is not a regular file"));
  }
  std::ifstream file(path, std::ios::binary);
  std::string bytes(most_bytes + 1, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (file.bad() || (file.fail() && !file.eof())) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be read"));
  }
  bytes.resize(static_cast<size_t>(file.gcount()));
  if (bytes.size() > most_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": has more than ", most_bytes, " bytes"));
  }
  return bytes;
}

}  // namespace mambascope::model
