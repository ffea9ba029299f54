#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// pool.Split for elementwise work on `numbers` numbers in all; on the calling thread where waking
// another one costs more than the work.
inline void SplitWork(ThreadPool& pool, int64_t numbers, int64_t count, int64_t multiple,
                      absl::FunctionRef<void(int64_t, int64_t)> run) {
  constexpr int64_t kWorthSplitting = 16384;
  pool.Split(count, numbers < kWorthSplitting ? std::max<int64_t>(count, 1) : multiple, run);
}

}  // namespace mambascope::kernels
