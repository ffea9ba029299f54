#pragma once

#include "tests/cuda/emulator/emulator.h"

inline void __pipeline_memcpy_async(void* shared, const void* global, size_t bytes) {
  emulator::CopyLater(shared, global, bytes);
}
inline void __pipeline_commit() { emulator::CommitCopies(); }
inline void __pipeline_wait_prior(size_t but_last) { emulator::FinishCopies(but_last); }
