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
  std::string bytes;
  char block[1 << 14];
  while (bytes.size() <= most_bytes && file.read(block, sizeof block).gcount() > 0) {
    bytes.append(block, static_cast<size_t>(file.gcount()));
  }
  if (file.bad() || (file.fail() && !file.eof())) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be read"));
  }
  if (bytes.size() > most_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": has more than ", most_bytes, " bytes"));
  }
  return bytes;
}

}  // namespace mambascope::model
