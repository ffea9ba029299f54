#include "server/model/image.h"

#include <array>
#include <memory>
#include <utility>

#include "server/base/status.h"
#include "server/model/image_resample.h"
#include "server/model/image_source.h"

namespace mambascope::model {
namespace {

constexpr int64_t kChannels = 3;

struct Resized {
  int64_t width, height;
};

// As torchvision's Resize: the long side is rounded down.
Resized SizeAfterResize(const ImageSource& source, const ImagePreprocessing& how) {
  if (!how.resize) return {source.width, source.height};
  if (how.shortest_edge == 0) return {how.width, how.height};
  const auto longer = [&](int64_t along, int64_t across) {
    return static_cast<int64_t>(static_cast<double>(int64_t{how.shortest_edge} * along) /
                                static_cast<double>(across));
  };
  if (source.width <= source.height) {
    return {how.shortest_edge, longer(source.height, source.width)};
  }
  return {longer(source.width, source.height), how.shortest_edge};
}

// As torchvision's CenterCrop: halves go to the even side. Negative: the picture is smaller.
int64_t CropStart(int64_t extent, int64_t wanted) {
  if (wanted > extent) return -((wanted - extent) / 2);
  const int64_t half = (extent - wanted) / 2;
  return (extent - wanted) % 2 == 1 && half % 2 == 1 ? half + 1 : half;
}

struct Axes {
  ResampleAxis across, down;
};

absl::StatusOr<Axes> PlanAxes(const ImageSource& source, const ImagePreprocessing& how) {
  const Resized resized = SizeAfterResize(source, how);
  if (!how.center_crop && (resized.width != how.image_size || resized.height != how.image_size)) {
    return ImageFault("has ", source.width, " x ", source.height, " pixels, ", resized.width, " x ",
                      resized.height, " after resizing; without a crop the model needs ",
                      how.image_size, " x ", how.image_size);
  }
  const ResampleFilter filter = how.resample == ImagePreprocessing::Resample::kBicubic
                                    ? ResampleFilter::kBicubic
                                    : ResampleFilter::kBilinear;
  return Axes{PlanResampling(source.width, resized.width, CropStart(resized.width, how.image_size),
                             how.image_size, filter),
              PlanResampling(source.height, resized.height,
                             CropStart(resized.height, how.image_size), how.image_size, filter)};
}

std::vector<float> Normalised(const std::vector<uint8_t>& rgb, const ImagePreprocessing& how) {
  std::array<std::array<float, 256>, kChannels> table;
  for (int64_t c = 0; c < kChannels; ++c) {
    for (int v = 0; v < 256; ++v) {
      table[c][v] = static_cast<float>((v * how.factor - how.mean[c]) / how.std[c]);
    }
  }
  const int64_t pixels = static_cast<int64_t>(rgb.size()) / kChannels;
  std::vector<float> planes(rgb.size());
  for (int64_t c = 0; c < kChannels; ++c) {
    for (int64_t i = 0; i < pixels; ++i) planes[c * pixels + i] = table[c][rgb[i * kChannels + c]];
  }
  return planes;
}

}  // namespace

absl::StatusOr<std::vector<float>> DecodeImage(absl::string_view bytes,
                                               const ImagePreprocessing& how) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ImageSource> source, OpenImage(bytes));
  ASSIGN_OR_RETURN(Axes axes, PlanAxes(*source, how));
  Resampler resampler(std::move(axes.across), std::move(axes.down));
  RETURN_IF_ERROR(source->ReadRows([&](const uint8_t* rgb) { resampler.AddRow(rgb); }));
  return Normalised(resampler.Finish(), how);
}

absl::StatusOr<int64_t> ImageDecodeBytes(absl::string_view bytes, const ImagePreprocessing& how) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ImageSource> source, OpenImage(bytes));
  ASSIGN_OR_RETURN(const Axes axes, PlanAxes(*source, how));
  const int64_t size = how.image_size, side = source->width + source->height;
  const int64_t weights = axes.across.bytes() + axes.down.bytes();
  const int64_t result = size * size * kChannels * static_cast<int64_t>(1 + sizeof(float));
  return source->held_bytes + source->height * size * kChannels + 64 * side + weights + result +
         kImageLibraryBytes;
}

}  // namespace mambascope::model
