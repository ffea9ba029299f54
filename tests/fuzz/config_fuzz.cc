// Any text as config.json and as preprocessor_config.json.
#include <cstdlib>
#include <string>

#include "server/model/config.h"
#include "server/model/image.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto config = mambascope::model::ParseConfig(text);
  if (config.ok() && (config->layers < 1 || config->d_model < 1)) abort();
  if (!config.ok() && config.status().message().empty()) abort();
  const auto how = mambascope::model::ReadImagePreprocessing(text, 32);
  if (how.ok() && how->image_size != 32) abort();
  return 0;
}
