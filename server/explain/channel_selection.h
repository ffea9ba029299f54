#pragma once

#include <cstdint>
#include <span>

#include "server/base/array.h"
#include "server/kernels/hidden_attention.h"

namespace mambascope::explain {

// The scan with the B and C of the `channels`, all of one of the `groups` (an invariant), for the
// kernels that take a list of channels: nothing is copied.
kernels::ScanParameters OfGroup(const kernels::ScanParameters& scan, int64_t groups,
                                std::span<const int32_t> channels);

// Some of a scan's channels side by side, as the map kernels want them.
class ChannelSelection {
 public:
  // The named channels, in their order, each as often as it is named; all of one of the `groups`
  // that share B and C (an invariant). The result borrows from `scan` and from this object, until
  // its next call.
  kernels::ScanParameters Of(const kernels::ScanParameters& scan, int64_t groups,
                             std::span<const int32_t> channels);

 private:
  Array<float> delta_;  // [tokens, channels]
  Array<float> A_;      // [d_state, channels]
};

}  // namespace mambascope::explain
