// Gemm without cuBLASLt: one sum after the other, in double. What it shares with the real one is
// the way that bf16 weights meet fp32 activations.
#include "server/kernels/cuda/gemm.h"

#include <algorithm>
#include <cmath>

#include "server/base/check.h"
#include "server/base/status.h"
#include "server/kernels/cuda/gemm_parts.h"
#include "server/kernels/split_body.h"

namespace mambascope::kernels::cuda {

struct Gemm::State {};
Gemm::Gemm(std::unique_ptr<State> state) : state_(std::move(state)) {}
Gemm::Gemm(Gemm&&) noexcept = default;
Gemm& Gemm::operator=(Gemm&&) noexcept = default;
Gemm::~Gemm() = default;
absl::StatusOr<Gemm> Gemm::Create() { return Gemm(std::make_unique<State>()); }

int64_t Gemm::LinearScratchBytes(const WeightMatrix& w, int64_t rows) {
  return w.type == ElementType::kF32 ? 0 : RowsCovered(kParts * rows) * (w.cols * 2 + w.rows * 4);
}

absl::Status Gemm::Linear(const float* x, int64_t x_stride, int64_t rows, const WeightMatrix& w,
                          const float* bias, float* y, int64_t y_stride, void* scratch,
                          cudaStream_t stream) {
  MS_CHECK(x_stride >= w.cols && y_stride >= w.rows && w.stride >= w.cols);
  for (const void* p : {static_cast<const void*>(x), w.data, static_cast<const void*>(y),
                        static_cast<const void*>(scratch)}) {
    MS_CHECK(reinterpret_cast<uintptr_t>(p) % 16 == 0);
  }
  MS_CHECK(w.type == ElementType::kF32 || scratch != nullptr);
  const auto multiply = [&](int64_t count, const auto& left, const auto& right, float* out,
                            int64_t stride) {
    for (int64_t m = 0; m < count; ++m) {
      for (int64_t n = 0; n < w.rows; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < w.cols; ++k) sum += double{left(m, k)} * right(n, k);
        out[m * stride + n] = static_cast<float>(sum);
      }
    }
    for (int64_t m = count; m < RowsCovered(count); ++m) {  // as the real one overwrites them
      std::fill_n(out + m * stride, w.rows, std::nanf(""));
    }
  };
  if (w.type == ElementType::kF32) {
    const auto* weights = static_cast<const float*>(w.data);
    multiply(
        rows, [&](int64_t m, int64_t k) { return x[m * x_stride + k]; },
        [&](int64_t n, int64_t k) { return weights[n * w.stride + k]; }, y, y_stride);
    return bias == nullptr ? absl::OkStatus() : AddBias(bias, rows, w.rows, y, y_stride, stream);
  }
  auto* sums = static_cast<float*>(scratch);
  auto* parts = reinterpret_cast<uint16_t*>(sums + RowsCovered(kParts * rows) * w.rows);
  RETURN_IF_ERROR(SplitRows(x, x_stride, rows, w.cols, w.cols, parts, stream));
  const auto* weights = static_cast<const uint16_t*>(w.data);
  multiply(
      kParts * rows, [&](int64_t m, int64_t k) { return body::WideBf16(parts[m * w.cols + k]); },
      [&](int64_t n, int64_t k) { return body::WideBf16(weights[n * w.stride + k]); }, sums,
      w.rows);
  return JoinRows(sums, bias, rows, w.rows, y, y_stride, stream);
}

absl::Status Gemm::AddBlocks(const Blocks& blocks, cudaStream_t) {
  for (int64_t p = 0; p < blocks.count; ++p) {
    for (int64_t i = 0; i < blocks.rows; ++i) {
      for (int64_t j = 0; j < blocks.cols; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < blocks.depth; ++k) {
          sum += double{blocks.a[p * blocks.a_step + i * blocks.a_stride + k]} *
                 blocks.b[p * blocks.b_step + j * blocks.b_stride + k];
        }
        blocks.c[p * blocks.c_step + i * blocks.c_stride + j] += static_cast<float>(sum);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace mambascope::kernels::cuda
