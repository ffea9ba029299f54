#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
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

// The most rows of x that our kernel takes; beyond, packing the weights has paid for itself.
// GFLOP/s of it and of PackedGemm, 3072 x 768 out of cache, one thread of a Sapphire Rapids VM: 64
// rows in fp32 89 and 80, in bf16 102 and 92; 96 rows 91 and 97, 103 and 108. With AVX2 the two are
// even at 64 rows.
inline constexpr int64_t kFewRowsLimit = 72;

// The fewest weight rows the own kernel takes: the lanes of the widest register.
inline constexpr int64_t kFewestColumns = 16;

// Multiplications below which a second thread costs more than it saves.
inline constexpr int64_t kGemmWorthSplitting = 32768;

// Those of the micro-kernels that run here; their name and BLIS's version.
BlockLengths BlisBlockLengths();
std::string BlisName();

// y = x w^T by BLIS, which knows fp32 alone: other weights are widened range by range.
void BlisLinear(ConstMatrix x, WeightMatrix w, Matrix y);

// c = beta c + a b^T by BLIS.
void BlisGemm(ConstMatrix a, ConstMatrix b, float beta, Matrix c);

// c = beta c + a b by BLIS.                                            a [M, K], b [K, N], c [M, N]
void BlisGemmTransposed(ConstMatrix a, ConstMatrix b, float beta, Matrix c);

// y (+)= x w^T by BLIS's micro-kernel in loops of ours. False, and nothing written, where the
// micro-kernel asks for more than they give it.
bool PackedGemm(ConstMatrix x, WeightMatrix w, bool accumulate, Matrix y);

// Copies rows [begin, end) of a matrix at k in [k, k + length) as panels of `width` rows, one after
// the other, each stored along its rows: to[k][row], 0 for rows beyond `end`. May write a register
// too much.
using PackPanels = absl::FunctionRef<void(int64_t begin, int64_t end, int64_t width, int64_t k,
                                          int64_t length, float* to)>;

// The same of any w [y.cols, x.cols] that can be packed.
bool PackedGemm(ConstMatrix x, PackPanels pack_w, bool accumulate, Matrix y);

// dx (+)= dy w in the same loops (linear_backward.cc).              dy [M, N], w [N, K], dx [M, K]
bool PackedTransposed(ConstMatrix dy, WeightMatrix w, bool accumulate, Matrix dx);

// The same by BLIS, which knows fp32 alone: other weights are widened range by range.
void BlisTransposed(ConstMatrix dy, WeightMatrix w, bool accumulate, Matrix dx);

// The same by our kernel for few rows. False, and nothing written, without fused multiply-adds.
bool FewRowsTransposed(ConstMatrix dy, WeightMatrix w, bool accumulate, Matrix dx);

// Columns [begin, end) of y = x w^T (+ bias) by our kernel; w.rows >= kFewestColumns.
void FewRowsLinear(ConstMatrix x, WeightMatrix w, const float* bias, int64_t begin, int64_t end,
                   Matrix y);

// Whether FewRowsLinear gives BlisLinear's bits on this CPU: tried on shapes around the block
// lengths, a few milliseconds. Linear asks once and otherwise leaves every row to BLIS.
bool FewRowsHaveTheBitsOfBlis();

// The same of PackedGemm, which stands in for BLIS in Linear and GemmBlock.
bool PackedGemmHasTheBitsOfBlis();

// What both said here when first asked.
bool LeaveFewRowsToOurKernel();
bool LeaveLoopsToUs();

// Splits a product [M, N] over K into about one tile a thread, or leaves it whole when it is small,
// and calls run(m, m_end, n, n_end) for each.
void ForTiles(ThreadPool& pool, int64_t M, int64_t N, int64_t K,
              absl::FunctionRef<void(int64_t, int64_t, int64_t, int64_t)> run);

}  // namespace mambascope::kernels
