#include "server/kernels/cuda/pinned.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "server/kernels/cuda/device.h"

namespace mambascope::kernels::cuda::internal {

absl::StatusOr<void*> AllocatePinned(size_t bytes) {
  if (bytes == 0) return static_cast<void*>(nullptr);
  void* memory = nullptr;
  if (const cudaError_t error = cudaMallocHost(&memory, bytes); error != cudaSuccess) {
    cudaGetLastError();  // reported here, not by the next launch
    return ToStatus(error, absl::StrCat(bytes, " bytes of pinned memory"));
  }
  return memory;
}

void FreePinned(void* memory) {
  if (memory != nullptr) cudaFreeHost(memory);
}

}  // namespace mambascope::kernels::cuda::internal
