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

enum class ElementType { kF32, kBF16 };

// A weight matrix [rows, cols] as it is stored; aligned to its elements. Borrowed for the call.
struct WeightMatrix {
  WeightMatrix() = default;
  WeightMatrix(const void* data, ElementType type, int64_t rows, int64_t cols, int64_t stride)
      : data(data), type(type), rows(rows), cols(cols), stride(stride) {}
  WeightMatrix(const float* data, int64_t rows, int64_t cols, int64_t stride)
      : WeightMatrix(data, ElementType::kF32, rows, cols, stride) {}
  WeightMatrix(ConstMatrix m)  // NOLINT(google-explicit-constructor): fp32 callers need no word
      : WeightMatrix(m.data, m.rows, m.cols, m.stride) {}

  const void* data = nullptr;
  ElementType type = ElementType::kF32;
  int64_t rows = 0, cols = 0, stride = 0;
};

// A linear layer:   y[m, n] = sum_k x[m, k] w[n, k] (+ bias[n])        x [M, K], w [N, K], y [M, N]
//
// Row-invariant: the bits of y's row m depend on x's row m, w and bias alone, never on M, on the
// other rows or on the thread count. A packed batch therefore equals each of its sequences alone,
// and one decoding step equals the same row of a prefill. (BLIS, one thread a column range, without
// its small-matrix path, which regroups the sum by shape. Its loops and packing are ours where they
// give the same bits; few rows take a bandwidth-bound kernel of ours that adds in the same order.)
// bf16 weights are widened, which is exact: the bits are those of the same weights in fp32.
// `bias` may be null. y must not overlap the inputs. Shapes are the caller's invariant (checked).
void Linear(ThreadPool& pool, ConstMatrix x, WeightMatrix w, const float* bias, Matrix y);

// One row of w as floats, exactly: out [w.cols]. What an embedding looks up.
void WidenRow(WeightMatrix w, int64_t row, float* out);

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
