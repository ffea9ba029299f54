#include "client/cli/render_patches.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cli/heat_scale.h"
#include "client/cli/render_map.h"

namespace mambascope::cli {
namespace {

constexpr size_t kTop = 5;

}  // namespace

bool RenderPatches(const Screen& screen, std::span<const float> values, int class_position,
                   std::ostream& out) {
  std::vector<float> patches(values.begin(), values.end());
  auto side = std::lround(std::sqrt(static_cast<double>(patches.size())));
  const bool all = side * side != static_cast<int64_t>(patches.size());  // the class token too
  if (all) {
    if (class_position < 0 || class_position >= static_cast<int64_t>(patches.size())) return false;
    patches.erase(patches.begin() + class_position);
    side = std::lround(std::sqrt(static_cast<double>(patches.size())));
    if (side * side != static_cast<int64_t>(patches.size())) return false;
  }
  if (patches.empty()) return false;
  RenderGrid(screen, patches, side, side, out);
  if (all) out << "  class token " << Number(values[class_position]) << "\n";
  std::vector<size_t> order(patches.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return std::abs(patches[a]) > std::abs(patches[b]); });
  order.resize(std::min(order.size(), kTop));
  for (const size_t patch : order) {
    out << absl::StrFormat("  row %2d, column %2d  %10s\n", patch / side, patch % side,
                           Number(patches[patch]));
  }
  return true;
}

}  // namespace mambascope::cli
