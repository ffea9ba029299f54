#include "server/kernels/flip.h"

#include <algorithm>

#include "absl/functional/function_ref.h"

namespace mambascope::kernels {
namespace {

// Calls run(row, its mirror image) for every row.
void ForMirrored(ThreadPool& pool, std::span<const int32_t> seq_start,
                 absl::FunctionRef<void(int64_t, int64_t)> run) {
  for (size_t s = 0; s + 1 < seq_start.size(); ++s) {
    const int64_t first = seq_start[s], last = seq_start[s + 1];
    pool.Split(last - first, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run(first + i, last - 1 - i);
    });
  }
}

}  // namespace

void FlipRows(ThreadPool& pool, const float* in, int64_t cols, std::span<const int32_t> seq_start,
              float* out) {
  ForMirrored(pool, seq_start, [&](int64_t row, int64_t mirror) {
    std::copy_n(in + mirror * cols, cols, out + row * cols);
  });
}

void AddFlipped(ThreadPool& pool, const float* backward, int64_t cols,
                std::span<const int32_t> seq_start, float scale, float* sum) {
  ForMirrored(pool, seq_start, [&](int64_t row, int64_t mirror) {
    float* to = sum + row * cols;
    const float* from = backward + mirror * cols;
    for (int64_t c = 0; c < cols; ++c) to[c] = scale * (to[c] + from[c]);
  });
}

}  // namespace mambascope::kernels
