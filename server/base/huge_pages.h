#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mambascope {

// Asks for pages of 2 MiB for the untouched memory [begin, begin + bytes), where the system grants
// them on request. Scans read a few cache lines of each token, which is 6 KiB of delta after the
// one before: with pages of 4 KiB every token is a walk through the page tables.
// Below 8 MiB the translation caches hold the pages anyway, and nothing is asked.
inline void AdviseHugePages([[maybe_unused]] void* begin, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  if (bytes < 4 * kHugePage) return;
  // Whole huge pages only: a larger range could take memory in that nobody touches.
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t first = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (address + bytes) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace mambascope
