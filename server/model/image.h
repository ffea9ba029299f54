#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/image_preprocessing.h"

namespace mambascope::model {

// From the bytes of a picture to a vision model's input: decode, resize, crop, scale, normalise.

// Limits of a picture, told by its header before anything is decoded.
inline constexpr int64_t kMaxImageSide = 16384;
inline constexpr int64_t kMaxImagePixels = 1 << 25;
// Each scan of a progressive JPEG costs a pass over all of it; encoders write some ten.
inline constexpr int kMaxJpegScans = 100;
inline constexpr int64_t kMaxJpegScanPixels = 1 << 30;  // scans times pixels

// [3, image_size, image_size], normalised, of a PNG or JPEG (told by its first bytes). The pixels
// are those of PIL's open(...).convert("RGB").resize(...), bit for bit: alpha is dropped, palettes,
// grey, 1 to 16 bits (the high byte counts), interlacing, progressive and CMYK are read (CMYK as
// Adobe stores it: inverted); the colour profile and the EXIF orientation are ignored, as by the
// published evaluation. Of grey with 16 bits PIL clips instead; here too the high byte counts.
//
// kInvalidArgument tells the fault of the image: empty, another format, broken, truncated, or
// beyond a limit above. No bytes crash it, and its memory stays within ImageDecodeBytes. One
// thread; callable from many at once.
absl::StatusOr<std::vector<float>> DecodeImage(absl::string_view bytes,
                                               const ImagePreprocessing& how);

// At most how much memory DecodeImage takes for these bytes, its result included and the bytes
// themselves not: about 3 x image_size x height, and where all of the picture must be held
// (interlaced PNG, progressive JPEG) up to 8 bytes a pixel more. Reads the header alone; fails as
// DecodeImage would.
absl::StatusOr<int64_t> ImageDecodeBytes(absl::string_view bytes, const ImagePreprocessing& how);

}  // namespace mambascope::model
