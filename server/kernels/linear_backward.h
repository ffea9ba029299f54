#pragma once

#include "server/base/thread_pool.h"
#include "server/kernels/gemm.h"

namespace mambascope::kernels {

// The gradient of a linear layer's input, y = x w^T (gemm.h), from the gradient of its output:
//   dx[m, k] (+)= sum_n dy[m, n] w[n, k]                       dy [M, N], w [N, K], dx [M, K]
//
// w is the matrix as it is stored, fp32 or bf16, without a transposed copy. Row-invariant as Linear
// is: the bits of dx's row m depend on dy's row m, w and, where it is added to, that row of dx
// alone. Without `accumulate` they are those of Linear of dy and w transposed. dx must not overlap
// the inputs. Shapes are the caller's invariant (checked).
void LinearTransposed(ThreadPool& pool, ConstMatrix dy, WeightMatrix w, bool accumulate, Matrix dx);

}  // namespace mambascope::kernels
