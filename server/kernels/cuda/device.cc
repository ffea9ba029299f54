#include "server/kernels/cuda/device.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"

namespace mambascope::kernels::cuda {

absl::Status ToStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message =
      absl::StrCat(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorDevicesUnavailable:
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(message);
  }
}

absl::Status LaunchStatus(absl::string_view kernel) { return ToStatus(cudaGetLastError(), kernel); }

int DeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // a machine without a GPU is no error of the next call
  return 0;
}

absl::Status UseDevice(int device) {
  const int count = DeviceCount();
  if (device < 0 || device >= count) {
    return absl::InvalidArgumentError(
        absl::StrCat("device: ", device, " does not exist, this machine has ", count));
  }
  return ToStatus(cudaSetDevice(device), absl::StrCat("device ", device));
}

absl::StatusOr<DeviceInfo> GetDeviceInfo(int device) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device);
      error != cudaSuccess) {
    return ToStatus(error, absl::StrCat("properties of device ", device));
  }
  DeviceInfo info;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.total_bytes = properties.totalGlobalMem;
  info.shared_bytes_per_block = properties.sharedMemPerBlockOptin;
  return info;
}

absl::StatusOr<MemoryInfo> GetMemoryInfo() {
  MemoryInfo info;
  if (const cudaError_t error = cudaMemGetInfo(&info.free_bytes, &info.total_bytes);
      error != cudaSuccess) {
    return ToStatus(error, "device memory");
  }
  return info;
}

absl::StatusOr<Stream> Stream::Create() {
  cudaStream_t stream = nullptr;
  // Non-blocking: nothing of ours uses the default stream, and a library's use of it must not stall
  // us.
  if (const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      error != cudaSuccess) {
    return ToStatus(error, "a stream");
  }
  return Stream(stream);
}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(stream_, other.stream_);
  return *this;
}

Stream::~Stream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status Stream::Wait() const { return ToStatus(cudaStreamSynchronize(stream_), "the stream"); }

namespace internal {

absl::StatusOr<void*> Allocate(size_t bytes) {
  if (bytes == 0) return static_cast<void*>(nullptr);
  void* memory = nullptr;
  if (const cudaError_t error = cudaMalloc(&memory, bytes); error != cudaSuccess) {
    cudaGetLastError();  // reported here, not by the next launch
    return ToStatus(error, absl::StrCat(bytes, " bytes of device memory"));
  }
  return memory;
}

void Free(void* memory) {
  if (memory != nullptr) cudaFree(memory);
}

absl::Status Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                  cudaStream_t stream) {
  if (bytes == 0) return absl::OkStatus();
  return ToStatus(cudaMemcpyAsync(to, from, bytes, kind, stream), "a copy");
}

absl::Status Zero(void* memory, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return absl::OkStatus();
  return ToStatus(cudaMemsetAsync(memory, 0, bytes, stream), "zeroing");
}

}  // namespace internal
}  // namespace mambascope::kernels::cuda
