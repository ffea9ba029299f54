#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

#include "absl/status/status.h"
#include "server/kernels/cuda/device.h"
#include "server/kernels/cuda/scan_tile.cuh"

namespace mambascope::kernels::cuda {

// launch(std::integral_constant<int, k>) with the least k states a lane that cover d_state.
template <typename Launch>
absl::Status WithStatesPerLane(int64_t d_state, const Launch& launch) {
  switch (body::StatesPerLane(d_state)) {
    case 1:
      return launch(std::integral_constant<int, 1>());
    case 2:
      return launch(std::integral_constant<int, 2>());
    case 4:
      return launch(std::integral_constant<int, 4>());
    case 8:
      return launch(std::integral_constant<int, 8>());
    default:
      return launch(std::integral_constant<int, 16>());
  }
}

// Starts kernel(arguments...) on blocks of kThreads with so much dynamic shared memory, for more
// than 48 KiB of which a kernel must be told once.
template <typename Kernel, typename... Arguments>
absl::Status LaunchScan(Kernel* kernel, dim3 grid, size_t shared_bytes, cudaStream_t stream,
                        absl::string_view name, const Arguments&... arguments) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return ToStatus(error, name);
  }
  kernel<<<grid, kThreads, shared_bytes, stream>>>(arguments...);
  return LaunchStatus(name);
}

}  // namespace mambascope::kernels::cuda
