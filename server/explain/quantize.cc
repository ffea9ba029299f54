#include "server/explain/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace mambascope::explain {

Grid GridOf(std::span<const float> values) {
  if (values.empty()) return {};
  float least = values[0], most = values[0];
  for (const float value : values) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
  if (least == most) {  // scale (0 - zero) is the value, bit for bit
    if (least == 0) return {};
    return {std::abs(least), least > 0 ? -1.0f : 1.0f};
  }
  const double range = double{most} - double{least};
  const double magnitude = std::max(std::abs(double{least}), std::abs(double{most}));
  const double scale = std::max(
      {range / 255, std::ldexp(magnitude, -22), double{std::numeric_limits<float>::min()}});
  Grid grid;
  // Rounded up, never down: the 256 steps must reach the far end.
  grid.scale = std::nextafter(static_cast<float>(scale), std::numeric_limits<float>::infinity());
  grid.zero = static_cast<float>(std::nearbyint(-double{least} / double{grid.scale}));
  return grid;
}

uint8_t Quantize(float value, const Grid& grid) {
  const double steps = double{value} / double{grid.scale} + double{grid.zero} + 0.5;
  if (!(steps > 0)) return 0;
  return static_cast<uint8_t>(std::min(steps, 255.0));
}

}  // namespace mambascope::explain
