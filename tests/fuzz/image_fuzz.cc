// Any bytes as a picture.
#include <cmath>
#include <cstdlib>

#include "server/model/image.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  mambascope::model::ImagePreprocessing how;
  how.image_size = 16;
  how.shortest_edge = 18;
  how.resize = size % 2 == 0;
  const auto image = DecodeImage(bytes, how);
  if (!image.ok()) return 0;
  if (image->size() != 3 * 16 * 16 || !ImageDecodeBytes(bytes, how).ok()) abort();
  for (const float value : *image) {
    if (!std::isfinite(value)) abort();
  }
  return 0;
}
