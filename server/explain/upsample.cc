#include "server/explain/upsample.h"

#include <algorithm>
#include <cmath>

#include "server/base/check.h"

namespace mambascope::explain {
namespace {

// Between which two patches a pixel lies along one axis, and how much the second counts.
struct Place {
  int64_t low = 0, high = 0;
  double weight = 0;
};

std::vector<Place> PlacesOf(int64_t side, int32_t size) {
  std::vector<Place> places(size);
  for (int32_t pixel = 0; pixel < size; ++pixel) {
    const double at = std::clamp((pixel + 0.5) * static_cast<double>(side) / size - 0.5, 0.0,
                                 static_cast<double>(side - 1));
    Place& place = places[pixel];
    place.low = static_cast<int64_t>(at);
    place.high = std::min(place.low + 1, side - 1);
    place.weight = at - static_cast<double>(place.low);
  }
  return places;
}

}  // namespace

std::vector<float> Upsample(std::span<const float> patches, int32_t size) {
  const auto side = static_cast<int64_t>(std::lround(std::sqrt(patches.size())));
  MS_CHECK(side > 0 && side * side == static_cast<int64_t>(patches.size()));
  const std::vector<Place> places = PlacesOf(side, size);
  std::vector<float> pixels;
  pixels.reserve(static_cast<size_t>(size) * size);
  for (const Place& row : places) {
    const auto between = [&](int64_t column) {
      return (1 - row.weight) * patches[row.low * side + column] +
             row.weight * patches[row.high * side + column];
    };
    for (const Place& column : places) {
      pixels.push_back(static_cast<float>((1 - column.weight) * between(column.low) +
                                          column.weight * between(column.high)));
    }
  }
  return pixels;
}

std::vector<float> PixelScores(std::span<const float> scores, const model::VisionConfig& vision) {
  MS_CHECK(static_cast<int64_t>(scores.size()) == vision.tokens());
  std::vector<float> patches(scores.begin(), scores.end());
  patches.erase(patches.begin() + vision.class_position());
  return Upsample(patches, vision.image_size);
}

}  // namespace mambascope::explain
