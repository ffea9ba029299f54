#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

// Runs device kernels on the CPU, so that their indexing, their barriers and their exchanges
// between lanes are tested where there is no GPU. The threads of a block are fibers that run one
// after the other from barrier to barrier; blocks run one after the other. It shows wrong results,
// reads of data that an asynchronous copy has not brought yet, and barriers that not every thread
// reaches; it says nothing about speed, about races that need threads at the same time, or about a
// device's own instructions. translate.py writes a kernel launch as a call of Launch.
struct dim3;
struct EmulatedIndex {
  unsigned x, y, z;
};
extern EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

void Launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);
// Dynamic shared memory of the block that runs; NaN when a block starts.
void* DynamicShared();

uint32_t Exchange(uint32_t value, int lane_mask);
void CopyLater(void* to, const void* from, size_t bytes);
void CommitCopies();
void FinishCopies(size_t but_last);  // carries out all batches but the last ones
void Barrier();
bool BarrierOr(bool vote);  // whether any thread of the block voted so

}  // namespace emulator

inline void __syncthreads() { emulator::Barrier(); }
inline int __syncthreads_or(int vote) { return emulator::BarrierOr(vote != 0) ? 1 : 0; }
inline float __shfl_xor_sync(unsigned, float value, int lane_mask) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = emulator::Exchange(bits, lane_mask);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}
