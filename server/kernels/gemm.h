#pragma once

#include <cstdint>
#include <string>

#include "server/base/thread_pool.h"

namespace mambascope::kernels {

// Row-major views; `stride` is the distance between rows in elements, >= cols. Borrowed for the
// call.
struct ConstMatrix {
  const float* data = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;
};
struct Matrix {
  float* data = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;
};

// A linear layer:   y[m, n] = sum_k x[m, k] w[n, k] (+ bias[n])        x [M, K], w [N, K], y [M, N]
//
// Row-invariant: the bits of y's row m depend on x's row m, w and bias alone, never on M, on the
// other rows or on the thread count. A packed batch therefore equals each of its sequences alone,
// and one decoding step equals the same row of a prefill. (BLIS, one thread a column range, without
// its small-matrix path, which regroups the sum by shape; few rows take a bandwidth-bound kernel of
// ours that adds in the same order.)
// `bias` may be null. y must not overlap the inputs. Shapes are the caller's invariant (checked).
void Linear(ThreadPool& pool, ConstMatrix x, ConstMatrix w, const float* bias, Matrix y);

// c (+)= a b^T on the calling thread: the building block of hidden-attention maps, called from
// inside a pool's task.                                               a [M, K], b [N, K], c [M, N]
void GemmBlock(ConstMatrix a, ConstMatrix b, bool accumulate, Matrix c);

// What a small Linear measured at start-up: which library and micro-kernel runs, how fast, and
// whether rows are invariant here (they are, unless the library was exchanged).
struct GemmReport {
  std::string implementation;
  double gflops = 0;
  bool row_invariant = false;
};
GemmReport CheckGemm(ThreadPool& pool);

}  // namespace mambascope::kernels
