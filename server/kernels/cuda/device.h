#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Devices, their memory and their streams, each owned by one object. A launcher takes raw device
// pointers, sizes and a stream, starts its kernels and returns; results are there when the stream
// has come so far.
namespace mambascope::kernels::cuda {

// OK, or what `what` ran into: RESOURCE_EXHAUSTED when memory is short, UNAVAILABLE when there is
// no usable device or driver, INTERNAL otherwise. The message names `what` and CUDA's own error.
absl::Status ToStatus(cudaError_t error, absl::string_view what);

// The error of the launch just made, if any, named after the kernel. Errors that a kernel meets
// while it runs come later, from Stream::Wait.
absl::Status LaunchStatus(absl::string_view kernel);

struct DeviceInfo {
  std::string name;          // as the driver calls it
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  size_t total_bytes = 0;
  size_t shared_bytes_per_block = 0;  // what a kernel may ask for
};

// How many devices this process may use; 0 without a GPU or a driver, which is no error.
int DeviceCount();

// Makes `device` the calling thread's. INVALID_ARGUMENT beyond DeviceCount().
absl::Status UseDevice(int device);
absl::StatusOr<DeviceInfo> GetDeviceInfo(int device);

// Of the calling thread's device.
struct MemoryInfo {
  size_t free_bytes = 0, total_bytes = 0;
};
absl::StatusOr<MemoryInfo> GetMemoryInfo();

// An in-order queue of work on the device that was the thread's when it was made.
class Stream {
 public:
  static absl::StatusOr<Stream> Create();
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept;
  ~Stream();

  cudaStream_t get() const { return stream_; }
  // Blocks until all that was put in so far has run; the first error of any of it.
  absl::Status Wait() const;

 private:
  explicit Stream(cudaStream_t stream) : stream_(stream) {}
  cudaStream_t stream_ = nullptr;
};

namespace internal {
absl::StatusOr<void*> Allocate(size_t bytes);
void Free(void* memory);
absl::Status Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                  cudaStream_t stream);
absl::Status Zero(void* memory, size_t bytes, cudaStream_t stream);
}  // namespace internal

// `size` elements of the calling thread's device, left uninitialised. Owns them; move only. Its end
// waits for all work of the device (as cudaFree does), so it may go while kernels still read it;
// for the same reason nothing on a request's path allocates.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  static absl::StatusOr<DeviceArray> Create(int64_t size) {
    auto memory = internal::Allocate(static_cast<size_t>(size) * sizeof(T));
    if (!memory.ok()) return memory.status();
    return DeviceArray(static_cast<T*>(*memory), size);
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    if (this != &other) {
      internal::Free(data_);
      data_ = std::exchange(other.data_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  ~DeviceArray() { internal::Free(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }

  // The first `count` elements from or to memory of the host. From pageable memory the source may
  // be changed once the call is back; what is read is there only after Stream::Wait.
  // `at`: first element here.
  absl::Status CopyFrom(const T* host, int64_t count, cudaStream_t stream, int64_t at = 0) {
    return internal::Copy(data_ + at, host, count * sizeof(T), cudaMemcpyHostToDevice, stream);
  }
  absl::Status CopyTo(T* host, int64_t count, cudaStream_t stream, int64_t at = 0) const {
    return internal::Copy(host, data_ + at, count * sizeof(T), cudaMemcpyDeviceToHost, stream);
  }
  absl::Status Zero(cudaStream_t stream) {
    return internal::Zero(data_, static_cast<size_t>(size_) * sizeof(T), stream);
  }

 private:
  DeviceArray(T* data, int64_t size) : data_(data), size_(size) {}
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace mambascope::kernels::cuda
