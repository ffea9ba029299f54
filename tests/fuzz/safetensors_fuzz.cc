// Any bytes as a safetensors file. First byte even: the file itself; odd: header text up to a zero
// byte, then data, put together with the right length, so that the search gets past it.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "server/model/safetensors.h"

namespace {

std::string FileOf(const std::string& input) {
  if (input[0] % 2 == 0) return input.substr(1);
  const size_t end = std::min(input.find('\0', 1), input.size());
  const uint64_t length = end - 1;
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + input.substr(1, length) + (end < input.size() ? input.substr(end + 1) : "");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes = FileOf(std::string(reinterpret_cast<const char*>(data), size));
  const int memory = memfd_create("safetensors", MFD_CLOEXEC);
  if (memory < 0 || write(memory, bytes.data(), bytes.size()) != ssize_t(bytes.size())) abort();
  const auto file =
      mambascope::model::SafetensorsFile::Open("/proc/self/fd/" + std::to_string(memory));
  close(memory);
  if (!file.ok()) return 0;
  size_t covered = 0;
  unsigned sum = 0;
  for (const auto& [name, view] : (*file)->tensors()) {
    size_t count = ByteSize(view.dtype);
    for (const int64_t extent : view.shape) count *= extent;
    if (count != view.bytes.size() || (*file)->Find(name) != &view) abort();
    for (const std::byte byte : view.bytes) sum += std::to_integer<unsigned>(byte);
    covered += view.bytes.size();
  }
  if (covered > bytes.size() || sum > 255 * bytes.size()) abort();
  return 0;
}
