#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "server/base/status.h"
#include "server/kernels/cuda/device.h"

namespace mambascope::model::cuda {

// An array to be large enough; its contents are lost when it grows. After an error it is empty.
template <typename Array>
absl::Status Grow(Array& array, int64_t size) {
  if (array.size() >= size) return absl::OkStatus();
  array = Array();  // gives its memory back first
  ASSIGN_OR_RETURN(array, Array::Create(size));
  return absl::OkStatus();
}

// The small arrays that a pass needs on the device (token ids, offsets, lists of pointers), brought
// there by one copy. Add all, Send, then At.
class Upload {
 public:
  using Place = size_t;

  void Clear() { host_.clear(); }

  template <typename T>
  Place Add(std::span<const T> values) {
    const Place place = (host_.size() + kAlignment - 1) / kAlignment * kAlignment;
    host_.resize(place + values.size_bytes());
    if (!values.empty()) std::memcpy(host_.data() + place, values.data(), values.size_bytes());
    return place;
  }
  template <typename T>
  Place Add(const std::vector<T>& values) {
    return Add(std::span<const T>(values));
  }

  // The host's bytes may be changed once it returns.
  absl::Status Send(cudaStream_t stream) {
    RETURN_IF_ERROR(Grow(device_, static_cast<int64_t>(host_.capacity())));
    return device_.CopyFrom(host_.data(), static_cast<int64_t>(host_.size()), stream);
  }

  // On the device, once `stream` has come so far.
  template <typename T>
  const T* At(Place place) const {
    return reinterpret_cast<const T*>(device_.data() + place);
  }

 private:
  static constexpr size_t kAlignment = 16;
  std::vector<std::byte> host_;
  kernels::cuda::DeviceArray<std::byte> device_;
};

}  // namespace mambascope::model::cuda
