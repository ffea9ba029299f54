#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mambascope::kernels::cuda {

namespace internal {
absl::StatusOr<void*> AllocatePinned(size_t bytes);
void FreePinned(void* memory);
}  // namespace internal

// `size` elements of the host's memory that the device reads and writes at full speed and without
// the host, left uninitialised: where results land. Pinning takes milliseconds, so nothing on a
// request's path allocates. Owns them; move only.
template <typename T>
class PinnedArray {
 public:
  PinnedArray() = default;
  // RESOURCE_EXHAUSTED when memory is short.
  static absl::StatusOr<PinnedArray> Create(int64_t size) {
    auto memory = internal::AllocatePinned(static_cast<size_t>(size) * sizeof(T));
    if (!memory.ok()) return memory.status();
    return PinnedArray(static_cast<T*>(*memory), size);
  }
  PinnedArray(PinnedArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  PinnedArray& operator=(PinnedArray&& other) noexcept {
    if (this != &other) {
      internal::FreePinned(data_);
      data_ = std::exchange(other.data_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  ~PinnedArray() { internal::FreePinned(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  PinnedArray(T* data, int64_t size) : data_(data), size_(size) {}
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace mambascope::kernels::cuda
