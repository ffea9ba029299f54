#pragma once

#include <cstdint>

#include "server/kernels/gemm.h"

// What Linear is made of, on the calling thread: for gemm.cc and its tests.
namespace mambascope::kernels {

// BLIS adds up k in blocks: one fused multiply-add chain a block, in the order of k, and the blocks
// one after the other. A block is `length` long, except that the last may be up to `longest`.
struct BlockLengths {
  int64_t length = 0, longest = 0;

  // The length of the block that begins at k, of K in all.
  int64_t At(int64_t k, int64_t K) const { return K - k <= longest ? K - k : length; }
};

// The most rows of x that our kernel takes. A library GEMM packs the weights anew for each call,
// and bf16 has to be widened first; few rows do not pay that back.
constexpr int64_t FewRowsLimit(ElementType type) { return type == ElementType::kF32 ? 112 : 192; }

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
