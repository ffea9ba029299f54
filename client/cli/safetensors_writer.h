#pragma once

#include <cstdio>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cli/answer.h"
#include "client/cli/tensors.h"

namespace mambascope::cli {

// Tensors by the name they have in the file; borrowed.
using NamedTensors = std::map<std::string, const Tensor*>;

// What --output holds: the main tensor of every explanation that succeeded under the explanation's
// id, its others under `id/name`, those of the prediction itself under their own names.
// kAlreadyExists if two claim one name.
absl::StatusOr<NamedTensors> TensorsForFile(const Answer& answer);

// A safetensors file that appears under its name only when it is whole: 8 bytes of length, a JSON
// header filled up with spaces to a multiple of 8, then the data in the order of the names. INT32
// becomes I32, everything else dense F32.
class SafetensorsFile {
 public:
  // Opens a temporary file beside `path`, so that a folder that cannot be written to shows before
  // any work is asked for. kInvalidArgument says why not.
  static absl::StatusOr<SafetensorsFile> Create(const std::string& path);
  ~SafetensorsFile();  // without a Write that succeeded nothing is left behind
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;

  // Writes all of it and gives the file its name. Call it once.
  absl::Status Write(const std::map<std::string, std::string>& metadata,
                     const NamedTensors& tensors);

 private:
  SafetensorsFile(std::string path, std::string temporary, std::FILE* file);
  bool Put(absl::string_view bytes);
  absl::Status PutTensor(const Tensor& tensor);

  std::string path_, temporary_;
  std::FILE* file_;
};

}  // namespace mambascope::cli
