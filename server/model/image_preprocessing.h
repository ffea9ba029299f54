#pragma once

#include <array>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace mambascope::model {

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

}  // namespace mambascope::model
