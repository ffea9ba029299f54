#pragma once

#include <cstdint>

#include "server/base/thread_pool.h"
#include "server/kernels/hidden_attention.h"

namespace mambascope::kernels {

// Rows of alpha for neighbouring targets at once (methods.md, section 9, no. 2; LaTIM's full maps):
//   rows[r, j, d] = alpha[d, first + r, j], zeros for j > first + r
// with rows [count, first + count, d_inner].
// Each exp(delta[j] A) is computed once for all rows of the block, whose adjoint recurrences run
// side by side; a row has the bits of TargetRows for its target, whatever block it stands in.
//
// 1 <= count <= kMostRowsInBlock, 0 <= first, first + count <= scan.tokens (checked). `rows` is
// dense, borrowed for the call and written completely. A scan of Mamba-2's heads works as it is
// (d_inner = heads of one group, that group's B and C). Work is count x L D N multiply-adds
// and L D N exponentials, memory beyond the result 8 KiB x N a thread.
inline constexpr int64_t kMostRowsInBlock = 16;
void TargetRowBlock(ThreadPool& pool, const ScanParameters& scan, int64_t first, int64_t count,
                    float* rows);

}  // namespace mambascope::kernels
