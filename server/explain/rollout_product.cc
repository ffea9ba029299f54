#include "server/explain/rollout_product.h"

#include <algorithm>

#include "server/explain/method.h"
#include "server/kernels/gemm.h"

namespace mambascope::explain {
namespace {

// Rows of the product that one task turns over; its block of results stays in the first cache.
constexpr int64_t kBlock = 64;

}  // namespace

RolloutProduct::RolloutProduct(int64_t tokens, bool causal)
    : tokens_(tokens), causal_(causal), transposed_(tokens * tokens) {
  std::fill(transposed_.begin(), transposed_.end(), 0.0f);
  for (int64_t i = 0; i < tokens; ++i) transposed_[i * tokens + i] = 1;
}

int64_t RolloutProduct::Blocks(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }

int64_t RolloutProduct::MemoryFloats(int64_t tokens, bool causal) {
  return tokens * tokens + kBlock * tokens +
         std::min(kPlannedThreads, Blocks(tokens)) * kBlock * (causal ? kBlock : tokens);
}

void RolloutProduct::Multiply(ThreadPool& pool, const float* map, const double* sums, int64_t part,
                              int64_t parts) {
  const int64_t blocks = Blocks(tokens_);
  const int64_t first = blocks * part / parts, end = blocks * (part + 1) / parts;
  pool.Run(end - first, [&](int64_t task) {
    const int64_t column = (first + task) * kBlock, columns = std::min(kBlock, tokens_ - column);
    if (causal_) {
      MultiplyTriangle(map, sums, column, columns);
    } else {
      MultiplySquare(map, sums, column, columns);
    }
  });
}

// Row i of the new R reads rows <= i of the old one: blocks of rows are taken from the last to the
// first.
void RolloutProduct::MultiplyTriangle(const float* map, const double* sums, int64_t column,
                                      int64_t columns) {
  const int64_t L = tokens_;
  const float* const block = transposed_.data() + column * L;
  Array<float> added(kBlock * kBlock);
  for (int64_t row = (L - 1) / kBlock * kBlock; row >= column; row -= kBlock) {
    const int64_t rows = std::min(kBlock, L - row);
    const int64_t read = row + rows - column;  // both factors are 0 elsewhere
    kernels::GemmBlock({block + column, columns, read, L}, {map + row * L + column, rows, read, L},
                       /*accumulate=*/false, {added.data(), columns, rows, kBlock});
    AddRows(sums, column, columns, row, rows, added.data(), kBlock);
  }
}

void RolloutProduct::MultiplySquare(const float* map, const double* sums, int64_t column,
                                    int64_t columns) {
  const int64_t L = tokens_;
  Array<float> added(kBlock * L);
  for (int64_t row = 0; row < L; row += kBlock) {
    const int64_t rows = std::min(kBlock, L - row);
    kernels::GemmBlock({transposed_.data() + column * L, columns, L, L},
                       {map + row * L, rows, L, L}, /*accumulate=*/false,
                       {added.data() + row, columns, rows, L});
  }
  AddRows(sums, column, columns, 0, L, added.data(), L);
}

void RolloutProduct::AddRows(const double* sums, int64_t column, int64_t columns, int64_t row,
                             int64_t rows, const float* added, int64_t stride) {
  for (int64_t c = 0; c < columns; ++c) {
    float* const values = transposed_.data() + (column + c) * tokens_ + row;
    for (int64_t i = 0; i < rows; ++i) {
      values[i] += added[c * stride + i];
      if (sums != nullptr) values[i] = static_cast<float>(values[i] / sums[row + i]);
    }
  }
}

void RolloutProduct::ForEachBlock(ThreadPool& pool,
                                  absl::FunctionRef<void(std::span<const float> rows)> use) const {
  const int64_t L = tokens_;
  Array<float> rows(std::min(kBlock, L) * L);
  for (int64_t begin = 0; begin < L; begin += kBlock) {
    const int64_t count = std::min(kBlock, L - begin);
    pool.Split(L, kBlock, [&](int64_t first, int64_t end) {
      for (int64_t j = first; j < end; ++j) {
        for (int64_t i = 0; i < count; ++i) rows[i * L + j] = transposed_[j * L + begin + i];
      }
    });
    use({rows.data(), static_cast<size_t>(count * L)});
  }
}

}  // namespace mambascope::explain
