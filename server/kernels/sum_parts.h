#pragma once

#include <algorithm>
#include <cstdint>

namespace mambascope::kernels {

// Rows [begin, end) of to[i, n] = sum over tasks of parts[task, i, n], in the order of the tasks,
// whichever thread computed them. parts [tasks] at a distance of part_size, rows of `cols` floats.
inline void SumParts(const float* parts, int64_t part_size, int64_t tasks, int64_t begin,
                     int64_t end, int64_t cols, int64_t stride, float* to) {
  for (int64_t i = begin; i < end; ++i) {
    float* row = to + i * stride;
    std::fill_n(row, cols, 0.0f);
    for (int64_t task = 0; task < tasks; ++task) {
      const float* part = parts + task * part_size + i * cols;
      for (int64_t n = 0; n < cols; ++n) row[n] += part[n];
    }
  }
}

}  // namespace mambascope::kernels
