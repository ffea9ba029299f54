#pragma once

#include <cstdint>
#include <span>

#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// Sequences read from their ends, as Vision Mamba's backward scan does (arXiv 2401.09417, alg. 1).
// Rows of `cols` numbers, dense; `seq_start` [sequences + 1] as everywhere in kernels/.

// out[first + i] = in[last - 1 - i] for each sequence [first, last). `out` must not overlap `in`.
void FlipRows(ThreadPool& pool, const float* in, int64_t cols, std::span<const int32_t> seq_start,
              float* out);

// sum[first + i] = scale (sum[first + i] + backward[last - 1 - i])
void AddFlipped(ThreadPool& pool, const float* backward, int64_t cols,
                std::span<const int32_t> seq_start, float scale, float* sum);

}  // namespace mambascope::kernels
