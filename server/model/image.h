#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace mambascope::model {

// From the bytes of a picture to a vision model's input: decode, resize, crop, scale, normalise.

// What a vision model's preprocessor_config.json says (the Hugging Face keys do_resize, size,
// resample, do_center_crop, crop_size, do_rescale, rescale_factor, do_normalize, image_mean,
// image_std). The result has image_size x image_size pixels.
struct ImagePreprocessing {
  enum class Resample { kBilinear, kBicubic };  // PIL's 2 and 3

  int32_t image_size = 224;
  bool resize = true;
  int32_t shortest_edge = 256;    // resized to this, proportions kept; or, where it is 0,
  int32_t height = 0, width = 0;  // to exactly these
  Resample resample = Resample::kBicubic;
  bool center_crop = true;  // to image_size; what lies outside a smaller picture is black
  double factor = 1.0 / 255;
  std::array<double, 3> mean = {0.485, 0.456, 0.406};  // ImageNet's, of red, green, blue
  std::array<double, 3> std = {0.229, 0.224, 0.225};
};

// An empty text is an absent file. What is absent is as in the published evaluation of Vim: bicubic
// to a shortest edge of image_size / 0.875, rounded down (256 for 224), centre crop, 1/255,
// ImageNet's mean and std; a crop_size that is there must be image_size. A plain number as `size`
// means a square, as Hugging Face reads it. kInvalidArgument names the key, its value and what is
// allowed, all faults at once; keys that would change pixels in other ways (do_pad, crop_pct, ...)
// are refused, others are ignored.
absl::StatusOr<ImagePreprocessing> ReadImagePreprocessing(absl::string_view json_or_empty,
                                                          int32_t image_size);

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
