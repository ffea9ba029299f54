#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/kernels/gemm.h"

namespace mambascope::kernels::cuda {

// Matrix products through cuBLASLt, on one device and from one thread at a time. All pointers are
// of the device and borrowed until `stream` has run the call.
class Gemm {
 public:
  // Rows that one problem of Linear has, whatever the number asked for.
  static constexpr int64_t kRowBlock = 64;
  static constexpr int64_t RowsCovered(int64_t rows) {
    return (rows + kRowBlock - 1) / kRowBlock * kRowBlock;
  }

  static absl::StatusOr<Gemm> Create();
  Gemm(Gemm&&) noexcept;
  Gemm& operator=(Gemm&&) noexcept;
  ~Gemm();

  // y[m, n] = sum_k x[m, k] w[n, k] (+ bias[n])             x [rows, K], w [N, K], y [rows, N],
  // fp32
  //
  // Row-invariant: the bits of y's row m depend on x's row m, w and bias alone. cuBLASLt is never
  // told `rows`: it sees problems of kRowBlock rows, as many of them in one batched call as cover
  // `rows`, so there is no other shape that it could answer with another kernel or another order of
  // additions, and a batch only multiplies the grid. One algorithm a shape (strides included) is
  // chosen when the shape is first seen, for the same shape always, and kept; algorithms that split
  // a sum among blocks (split-K, stream-K) are refused by the reduction scheme, by their own
  // configuration and by giving them no workspace. TF32 is off. In exchange rows up to
  // RowsCovered(rows) are computed: x and y must be that long, what the rows beyond hold does not
  // matter and is overwritten in y.
  //
  // bf16 weights meet fp32 activations as on the CPU, where the weights are widened: x is taken
  // apart into three bf16 numbers that add up to it, the tensor cores multiply each, and fp32 adds
  // the three products up. Needs `scratch` of LinearScratchBytes bytes; fp32 weights need none.
  // x, y and scratch on 16 bytes. Errors: INTERNAL with cuBLASLt's status.
  absl::Status Linear(const float* x, int64_t x_stride, int64_t rows, const WeightMatrix& w,
                      const float* bias, float* y, int64_t y_stride, void* scratch,
                      cudaStream_t stream);
  static int64_t LinearScratchBytes(const WeightMatrix& w, int64_t rows);

  // c[p] += a[p] b[p]^T for `count` problems whose matrices lie `step` elements apart, fp32 without
  // TF32.                                                   a [rows, depth], b [cols, depth]
  struct Blocks {
    int64_t rows = 0, cols = 0, depth = 0, count = 0;
    const float *a = nullptr, *b = nullptr;
    float* c = nullptr;
    int64_t a_stride = 0, b_stride = 0, c_stride = 0;
    int64_t a_step = 0, b_step = 0, c_step = 0;
  };
  absl::Status AddBlocks(const Blocks& blocks, cudaStream_t stream);

 private:
  struct State;
  explicit Gemm(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace mambascope::kernels::cuda
