#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "server/base/array.h"
#include "server/kernels/hidden_attention.h"

namespace mambascope::kernels {

// How many of a scan's channels a call means: an empty list names all of them.
inline int64_t ChannelCount(const ScanParameters& scan, std::span<const int32_t> channels) {
  return channels.empty() ? scan.d_inner : static_cast<int64_t>(channels.size());
}

// Up to `width` of a call's channels side by side, so that registers hold neighbours whatever list
// was asked for; missing channels have delta = 0 and A = 0, which adds nothing to any map.
class ChannelGroup {
 public:
  // Channels `first` .. of the list. Reads the scan's own delta where it can and copies otherwise.
  ChannelGroup(const ScanParameters& scan, std::span<const int32_t> channels, int64_t first,
               int64_t width)
      : width_(width),
        count_(std::min(width, ChannelCount(scan, channels) - first)),
        A_(scan.d_state * width) {
    const auto channel = [&](int64_t c) {
      return channels.empty() ? first + c : channels[first + c];
    };
    constexpr float kLog2E = 1.44269504f;  // decays are taken as powers of two
    for (int64_t n = 0; n < scan.d_state; ++n) {
      for (int64_t c = 0; c < width; ++c) {
        A_[n * width + c] = c < count_ ? scan.A[n * scan.d_inner + channel(c)] * kLog2E : 0.0f;
      }
    }
    bool neighbours = count_ == width;
    for (int64_t c = 0; c < count_; ++c) neighbours = neighbours && channel(c) == channel(0) + c;
    if (neighbours) {
      delta_ = scan.delta + channel(0);
      stride_ = scan.d_inner;
      return;
    }
    copy_ = Array<float>(scan.tokens * width);
    for (int64_t i = 0; i < scan.tokens; ++i) {
      for (int64_t c = 0; c < width; ++c) {
        copy_[i * width + c] = c < count_ ? scan.delta[i * scan.d_inner + channel(c)] : 0.0f;
      }
    }
    delta_ = copy_.data();
    stride_ = width;
  }

  int64_t width() const { return width_; }
  int64_t count() const { return count_; }  // channels that are there
  const float* delta(int64_t token) const { return delta_ + token * stride_; }  // [width]
  const float* A() const { return A_.data(); }  // [d_state, width], times log2(e)

 private:
  int64_t width_, count_;
  Array<float> A_, copy_;
  const float* delta_;
  int64_t stride_;
};

}  // namespace mambascope::kernels
