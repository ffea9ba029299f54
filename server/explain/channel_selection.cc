#include "server/explain/channel_selection.h"

#include <cstring>

#include "server/base/check.h"

namespace mambascope::explain {

kernels::ScanParameters OfGroup(const kernels::ScanParameters& scan, int64_t groups,
                                std::span<const int32_t> channels) {
  const int64_t of_group = scan.d_inner / groups, group = channels.front() / of_group;
  for (const int32_t channel : channels) MS_CHECK(channel / of_group == group);
  kernels::ScanParameters shifted = scan;
  shifted.B += group * scan.d_state;
  shifted.C += group * scan.d_state;
  return shifted;
}

kernels::ScanParameters ChannelSelection::Of(const kernels::ScanParameters& scan, int64_t groups,
                                             std::span<const int32_t> channels) {
  const auto count = static_cast<int64_t>(channels.size());
  const int64_t all = scan.d_inner;
  bool adjacent = true;
  for (int64_t c = 0; c < count; ++c) adjacent = adjacent && channels[c] == channels[0] + c;
  if (adjacent && count == all && groups == 1) return scan;
  kernels::ScanParameters selected = OfGroup(scan, groups, channels);

  delta_.Reserve(count * scan.tokens);
  A_.Reserve(count * scan.d_state);
  const auto gather = [&](const float* from, float* to) {
    if (adjacent) {
      std::memcpy(to, from + channels[0], count * sizeof(float));
    } else {
      for (int64_t c = 0; c < count; ++c) to[c] = from[channels[c]];
    }
  };
  for (int64_t i = 0; i < scan.tokens; ++i) {
    gather(scan.delta + i * all, delta_.data() + i * count);
  }
  for (int64_t n = 0; n < scan.d_state; ++n) gather(scan.A + n * all, A_.data() + n * count);
  selected.d_inner = count;
  selected.delta = delta_.data();
  selected.A = A_.data();
  return selected;
}

}  // namespace mambascope::explain
