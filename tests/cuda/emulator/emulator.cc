#include "tests/cuda/emulator/emulator.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "server/base/check.h"
#include "server/base/thread_pool.h"
#include "tests/cuda/emulator/cuda_runtime_api.h"

EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr int kWarp = 32;

struct PendingCopy {
  void* to;
  const void* from;
  size_t bytes;
};

enum class At { kRunning, kBarrier, kExchange, kEnd };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  At at = At::kRunning;
  uint32_t offered[2];  // this exchange's value and the one's before, which slower lanes still read
  unsigned exchanges = 0;
  std::vector<PendingCopy> open;
  std::deque<std::vector<PendingCopy>> batches;
};

std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<char> shared_memory;
ucontext_t scheduler;
unsigned current = 0;
const std::function<void()>* running = nullptr;

Fiber& Current() { return *fibers[current]; }

void Yield(At at) {
  Current().at = at;
  swapcontext(&Current().context, &scheduler);
}

void Start() {
  (*running)();
  Current().at = At::kEnd;
}

void Resume(unsigned thread) {
  current = thread;
  threadIdx = {thread, 0, 0};
  swapcontext(&scheduler, &fibers[thread]->context);
}

// Lets the threads of [begin, end) go on if those that have not ended all stand at `at`.
bool Release(unsigned begin, unsigned end, At at) {
  bool any = false;
  for (unsigned t = begin; t < end; ++t) {
    if (fibers[t]->at == At::kEnd) continue;
    if (fibers[t]->at != at) return false;
    any = true;
  }
  for (unsigned t = begin; t < end; ++t) {
    if (fibers[t]->at == at) fibers[t]->at = At::kRunning;
  }
  return any;
}

void RunBlock(unsigned threads, size_t shared_bytes) {
  shared_memory.assign(shared_bytes + 64, static_cast<char>(0xff));
  while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = *fibers[t];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, Start, 0);
    fiber.at = At::kRunning;
    fiber.exchanges = 0;
    fiber.open.clear();
    fiber.batches.clear();
  }
  for (;;) {
    bool ended = true;
    for (unsigned t = 0; t < threads; ++t) {
      if (fibers[t]->at == At::kRunning) Resume(t);
      ended &= fibers[t]->at == At::kEnd;
    }
    if (ended) return;
    bool progress = Release(0, threads, At::kBarrier);
    for (unsigned first = 0; first < threads; first += kWarp) {
      progress |= Release(first, std::min(first + kWarp, threads), At::kExchange);
    }
    MS_CHECK(progress);  // some threads wait at a barrier that others never reach
  }
}

}  // namespace

void Launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  // As the compiler's switch does on the device, subnormal numbers are zero.
  static mambascope::ThreadPool pool(1);
  pool.Run(1, [&](int64_t) {
    running = &kernel;
    gridDim = {grid.x, grid.y, grid.z};
    blockDim = {block.x, block.y, block.z};
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
      for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) RunBlock(block.x, shared_bytes);
      }
    }
  });
}

void* DynamicShared() {
  const auto address = reinterpret_cast<uintptr_t>(shared_memory.data());
  return reinterpret_cast<void*>((address + 63) / 64 * 64);
}

uint32_t Exchange(uint32_t value, int lane_mask) {
  Fiber& fiber = Current();
  const unsigned turn = fiber.exchanges++ % 2;
  fiber.offered[turn] = value;
  Yield(At::kExchange);
  return fibers[current ^ static_cast<unsigned>(lane_mask)]->offered[turn];
}

void CopyLater(void* to, const void* from, size_t bytes) {
  Current().open.push_back({to, from, bytes});
}

void CommitCopies() {
  Current().batches.push_back(std::move(Current().open));
  Current().open.clear();
}

void FinishCopies(size_t but_last) {
  auto& batches = Current().batches;
  while (batches.size() > but_last) {
    for (const PendingCopy& copy : batches.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    batches.pop_front();
  }
}

void Barrier() { Yield(At::kBarrier); }

bool BarrierOr(bool vote) {
  static bool votes = false;
  votes = votes || vote;
  Barrier();
  const bool any = votes;
  Barrier();  // all have read
  votes = false;
  Barrier();  // nobody votes again before it is cleared
  return any;
}

}  // namespace emulator

namespace {
constexpr size_t kTotalBytes = size_t{8} << 30;
size_t used_bytes = 0;
cudaError_t last_error = cudaSuccess;

// Device memory starts as NaN and stands between guards that its end finds unharmed: what was never
// written must not look like a result, and nothing may be written beyond.
constexpr size_t kGuard = 256;
constexpr size_t kMostFilled = size_t{64} << 20;  // larger ones are not touched: they cost memory
constexpr int kGuardByte = 0xa5;

size_t Rounded(size_t bytes) { return (bytes + kGuard - 1) / kGuard * kGuard; }
bool Unharmed(const char* guard, size_t bytes) {
  return std::all_of(guard, guard + bytes,
                     [](char c) { return static_cast<unsigned char>(c) == kGuardByte; });
}
}  // namespace

const char* cudaGetErrorName(cudaError_t) { return "emulated error"; }
const char* cudaGetErrorString(cudaError_t) { return "emulated error"; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"emulated", 9, 0, 1, kTotalBytes, size_t{227} << 10};
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = kTotalBytes - used_bytes;
  *total = kTotalBytes;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (bytes > kTotalBytes - used_bytes) return last_error = cudaErrorMemoryAllocation;
  used_bytes += bytes;
  const size_t tail = Rounded(bytes) - bytes + kGuard;
  auto* first = static_cast<char*>(std::aligned_alloc(kGuard, kGuard + bytes + tail));
  std::memset(first, kGuardByte, kGuard);
  std::memcpy(first, &bytes, sizeof(bytes));
  std::memset(first + kGuard, 0xff, bytes <= kMostFilled ? bytes : 0);
  std::memset(first + kGuard + bytes, kGuardByte, tail);
  *memory = first + kGuard;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  char* first = static_cast<char*>(memory) - kGuard;
  size_t bytes;
  std::memcpy(&bytes, first, sizeof(bytes));
  MS_CHECK(Unharmed(first + sizeof(bytes), kGuard - sizeof(bytes)));
  MS_CHECK(Unharmed(first + kGuard + bytes, Rounded(bytes) - bytes + kGuard));
  used_bytes -= bytes;
  std::free(first);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
