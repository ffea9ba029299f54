#pragma once

#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "server/base/array.h"
#include "server/base/thread_pool.h"

namespace mambascope::explain {

// The product R of the layers' matrices I + map so far (methods.md, section 4), [tokens, tokens],
// grown from the left. Threads change no bit: a task owns some of R's columns and needs no other's.
class RolloutProduct {
 public:
  RolloutProduct() = default;
  // The identity. `causal`: maps are lower triangular, and so is R.
  RolloutProduct(int64_t tokens, bool causal);
  // Multiply-adds of one layer; the most parts that it can be cut into; floats in all.
  static int64_t Work(int64_t tokens, bool causal) {
    return tokens * tokens * tokens / (causal ? 6 : 1);
  }
  static int64_t Blocks(int64_t tokens);
  static int64_t MemoryFloats(int64_t tokens, bool causal);

  // R <- (I + map) R in place, in `parts` calls; rows divided by `sums` [tokens] unless null.
  void Multiply(ThreadPool& pool, const float* map, const double* sums, int64_t part,
                int64_t parts);
  // All entries, in no order that matters.
  std::span<const float> values() const { return transposed_; }
  // Some rows of R at a time, in order.
  void ForEachBlock(ThreadPool& pool,
                    absl::FunctionRef<void(std::span<const float> rows)> use) const;

 private:
  void MultiplyTriangle(const float* map, const double* sums, int64_t column, int64_t columns);
  void MultiplySquare(const float* map, const double* sums, int64_t column, int64_t columns);
  void AddRows(const double* sums, int64_t column, int64_t columns, int64_t row, int64_t rows,
               const float* added, int64_t stride);

  int64_t tokens_ = 0;
  bool causal_ = true;
  Array<float> transposed_;  // [tokens, tokens]: row c is R's column c
};

}  // namespace mambascope::explain
