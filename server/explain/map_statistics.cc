#include "server/explain/map_statistics.h"

#include <cmath>
#include <vector>

namespace mambascope::explain {
namespace {

struct RowStatistics {
  double first = 0, own = 0, entropy = 0, distance = 0;
  bool mass = false;
};

RowStatistics Of(const float* row, int64_t i, int64_t tokens) {
  double mass = 0;
  for (int64_t j = 0; j < tokens; ++j) mass += std::fabs(row[j]);
  RowStatistics of;
  if (!(mass > 0)) return of;
  of.mass = true;
  for (int64_t j = 0; j < tokens; ++j) {
    if (row[j] == 0) continue;
    const double share = std::fabs(row[j]) / mass;
    if (j == 0) of.first = share;
    if (j == i) of.own = share;
    of.entropy -= share * std::log(share);
    of.distance += share * static_cast<double>(std::abs(i - j));
  }
  return of;
}

}  // namespace

void AddStatistics(ThreadPool& pool, int32_t layer, const float* map, int64_t tokens,
                   v1::MapStatistics* statistics) {
  std::vector<RowStatistics> rows(tokens);
  pool.Run(tokens, [&](int64_t i) { rows[i] = Of(map + i * tokens, i, tokens); });
  RowStatistics sum;
  double count = 0;
  for (const RowStatistics& row : rows) {
    if (!row.mass) continue;
    ++count;
    sum.first += row.first;
    sum.own += row.own;
    sum.entropy += row.entropy;
    sum.distance += row.distance;
  }
  if (count == 0) count = 1;
  statistics->add_layers(layer);
  statistics->add_first_share(static_cast<float>(sum.first / count));
  statistics->add_diagonal_share(static_cast<float>(sum.own / count));
  statistics->add_entropy(static_cast<float>(sum.entropy / count));
  statistics->add_mean_distance(static_cast<float>(sum.distance / count));
}

}  // namespace mambascope::explain
