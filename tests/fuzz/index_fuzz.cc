// Any text as model.safetensors.index.json, beside two shards of one tensor each, "a" and "b".
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "server/model/checkpoint.h"

namespace {

std::string MakeFolder() {
  std::string folder = std::filesystem::temp_directory_path() / "mambascope-fuzz-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) abort();
  for (const std::string name : {"a", "b"}) {
    const std::string header =
        "{\"" + name + "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
    std::string file(8, '\0');
    file[0] = static_cast<char>(header.size());
    std::ofstream(folder + "/" + name + ".safetensors") << file << header << 'x';
  }
  return folder;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string folder = MakeFolder();
  std::ofstream(folder + "/model.safetensors.index.json", std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  const auto checkpoint = mambascope::model::Checkpoint::Open(folder);
  if (!checkpoint.ok()) return 0;
  for (const auto& file : (*checkpoint)->files()) {
    if (std::filesystem::path(file->path()).parent_path() != folder) abort();
  }
  return 0;
}
