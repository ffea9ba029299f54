#pragma once

#include <cstdint>

#include "server/kernels/gemm.h"

// What Linear is made of, on the calling thread: for gemm.cc and its tests.
namespace mambascope::kernels {

// BLIS adds up k in blocks: one fused multiply-add chain a block, in the order of k, and the blocks
// one after the other. A block is `length` long, except that the last may be up to `longest`.
struct BlockLengths {
  int64_t length = 0, longest = 0;
};

// A library GEMM packs the weights anew for each call; few rows do not pay that back. GFLOP/s of
// BLIS and of ours, 3072 x 768 weights out of cache: 1 row 1.7 and 5.3, 8 rows 11 and 34, 16 rows
// 18 and 54, 32 rows 38 and 64, 64 rows 55 and 64, 80 rows 64 and 66, 96 rows 74 and 67 (medians of
// 15 alternating rounds, one thread's CPU time, Sapphire Rapids VM under a load of 11).
inline constexpr int64_t kFewRows = 64;

// The fewest weight rows the own kernel takes: the lanes of the widest register.
inline constexpr int64_t kFewestColumns = 16;

// y = x w^T by BLIS, which knows fp32 alone: other weights are widened range by range.
void BlisLinear(ConstMatrix x, WeightMatrix w, Matrix y);

// Columns [begin, end) of y = x w^T (+ bias) by our kernel; w.rows >= kFewestColumns.
void FewRowsLinear(ConstMatrix x, WeightMatrix w, const float* bias, int64_t begin, int64_t end,
                   Matrix y);

// Whether FewRowsLinear gives BlisLinear's bits on this CPU: tried on shapes around the block
// lengths, a few milliseconds. Linear asks once and otherwise leaves every row to BLIS.
bool FewRowsHaveTheBitsOfBlis();

}  // namespace mambascope::kernels
