#include "server/model/image_preprocessing.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/model/json_reader.h"

namespace mambascope::model {
namespace {

using Json = nlohmann::json;

constexpr int64_t kChannels = 3;
constexpr int32_t kMaxImageSize = 4096;
constexpr double kEvaluationCrop = 0.875;  // Vim's eval_crop_ratio

std::optional<int32_t> AsSize(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t size = value.get<uint64_t>();
  if (size < 1 || size > kMaxImageSize) return std::nullopt;
  return static_cast<int32_t>(size);
}

// 224, or {"height": 224, "width": 224}.
std::optional<std::array<int32_t, 2>> AsHeightAndWidth(const Json& value) {
  if (const std::optional<int32_t> side = AsSize(value)) return {{*side, *side}};
  if (!value.is_object() || value.size() != 2 || !value.contains("height") ||
      !value.contains("width")) {
    return std::nullopt;
  }
  const std::optional<int32_t> height = AsSize(value["height"]), width = AsSize(value["width"]);
  if (!height || !width) return std::nullopt;
  return {{*height, *width}};
}

void ReadSize(JsonReader& reader, ImagePreprocessing& how) {
  const Json* size = reader.Find("size");
  if (size == nullptr) return;
  if (const auto exact = AsHeightAndWidth(*size)) {
    how.shortest_edge = 0;
    how.height = (*exact)[0];
    how.width = (*exact)[1];
    return;
  }
  const bool is_edge = size->is_object() && size->size() == 1 && size->contains("shortest_edge");
  const std::optional<int32_t> edge =
      is_edge ? AsSize((*size)["shortest_edge"]) : std::optional<int32_t>();
  if (edge.has_value()) {
    how.shortest_edge = *edge;
  } else {
    reader.Fault("size",
                 absl::StrCat(Shown(*size),
                              " is neither a number, {height, width} nor {shortest_edge} in [1, ",
                              kMaxImageSize, "]"));
  }
}

// The picture must come out with image_size pixels a side, whatever went in.
void CheckResult(JsonReader& reader, const ImagePreprocessing& how) {
  const Json* size = reader.Find("size");
  if (!how.resize || size == nullptr) return;
  const int32_t least = how.shortest_edge > 0 ? how.shortest_edge : std::min(how.height, how.width);
  const bool exact = how.height == how.image_size && how.width == how.image_size;
  if (how.center_crop && least < how.image_size) {
    reader.Fault("size", absl::StrCat(Shown(*size), " is less than the model's image_size ",
                                      how.image_size));
  } else if (!how.center_crop && how.shortest_edge == 0 && !exact) {
    reader.Fault("size", absl::StrCat(Shown(*size), " is not the model's image_size ",
                                      how.image_size, ", and do_center_crop is false"));
  }
}

void ReadColours(JsonReader& reader, const char* key, double above, std::array<double, 3>& values) {
  const Json* found = reader.Find(key);
  if (found == nullptr) return;
  bool sound = found->is_array() && found->size() == kChannels;
  for (size_t c = 0; sound && c < kChannels; ++c) {
    sound = (*found)[c].is_number();
    if (sound) values[c] = (*found)[c].get<double>();
    sound = sound && values[c] > above && std::abs(values[c]) <= 1e6;
  }
  if (sound) return;
  reader.Fault(key,
               absl::StrCat(Shown(*found), " is not three numbers", above == 0 ? " above 0" : ""));
}

}  // namespace

absl::StatusOr<ImagePreprocessing> ReadImagePreprocessing(absl::string_view json_or_empty,
                                                          int32_t image_size) {
  if (image_size < 1 || image_size > kMaxImageSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("image_size ", image_size, " is not in [1, ", kMaxImageSize, "]"));
  }
  ImagePreprocessing how;
  how.image_size = image_size;
  how.shortest_edge = static_cast<int32_t>(image_size / kEvaluationCrop);
  if (json_or_empty.empty()) return how;

  ASSIGN_OR_RETURN(const Json object, ParseJsonObject(json_or_empty));
  JsonReader reader(object);
  how.resize = reader.Flag("do_resize", true);
  how.center_crop = reader.Flag("do_center_crop", true);
  ReadSize(reader, how);
  if (const Json* resample = reader.Find("resample")) {
    if (*resample == 2 || *resample == 3) {
      how.resample = *resample == 2 ? ImagePreprocessing::Resample::kBilinear
                                    : ImagePreprocessing::Resample::kBicubic;
    } else {
      reader.Fault("resample",
                   absl::StrCat(Shown(*resample), " is neither 2 (bilinear) nor 3 (bicubic)"));
    }
  }
  const Json* crop = reader.Find("crop_size");
  if (crop != nullptr && how.center_crop) {
    const auto sizes = AsHeightAndWidth(*crop);
    if (!sizes.has_value() || (*sizes)[0] != image_size || (*sizes)[1] != image_size) {
      reader.Fault("crop_size",
                   absl::StrCat(Shown(*crop), " is not the model's image_size ", image_size));
    }
  }
  CheckResult(reader, how);

  const bool rescale = reader.Flag("do_rescale", true);
  const bool normalize = reader.Flag("do_normalize", true);
  if (const Json* factor = reader.Find("rescale_factor")) {
    const double value = factor->is_number() ? factor->get<double>() : 0;
    if (value > 0 && value <= 1e6) {
      how.factor = value;
    } else {
      reader.Fault("rescale_factor", absl::StrCat(Shown(*factor), " is not a number above 0"));
    }
  }
  ReadColours(reader, "image_mean", -1e6, how.mean);
  ReadColours(reader, "image_std", 0, how.std);
  if (!rescale) how.factor = 1;
  if (!normalize) {
    how.mean = {0, 0, 0};
    how.std = {1, 1, 1};
  }
  for (const char* key :
       {"do_pad", "do_flip_channel_order", "do_thumbnail", "do_align_long_axis"}) {
    if (reader.Flag(key, false)) reader.Fault(key, "true is not supported");
  }
  for (const char* key : {"crop_pct", "rescale_offset", "size_divisor"}) {
    if (const Json* value = reader.Find(key)) {
      reader.Fault(key, absl::StrCat(Shown(*value), " is not supported"));
    }
  }
  if (absl::Status status = reader.status(); !status.ok()) return status;
  return how;
}

}  // namespace mambascope::model
