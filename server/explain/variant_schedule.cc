#include "server/explain/variant_schedule.h"

#include <algorithm>
#include <utility>

#include "server/base/check.h"
#include "server/explain/options.h"
#include "server/model/recurrent_state.h"

namespace mambascope::explain {
namespace {

constexpr int64_t kSliceWork = int64_t{1} << 32;       // multiply-adds
constexpr int64_t kLeastRows = 128, kMostRows = 1024;  // of a pass: below, GEMMs become slow
constexpr int64_t kStateBytes = int64_t{256} << 20;    // of a pass's variants
constexpr int64_t kMostVariants = 64, kMostLogitRows = 64;

// Multiply-adds of one row through one layer.
int64_t WorkOf(const model::ModelConfig& config) {
  const int64_t d_model = config.d_model, d_inner = config.d_inner;
  int64_t scan = d_model * config.in_proj_rows() + d_inner * d_model;
  const int64_t direction = d_inner * (config.family == model::Family::kMamba2
                                           ? 0
                                           : config.selective_width() + config.dt_rank) +
                            4 * d_inner * config.d_state;
  scan += config.directions() * direction;
  return scan;
}

}  // namespace

PassLimits PassLimits::Of(const model::ModelConfig& config, int64_t rows, bool share) {
  const int64_t work = WorkOf(config);
  PassLimits limits;
  limits.rows = std::clamp(kSliceWork / work, kLeastRows, kMostRows);
  // Twice as many as fill a pass when they are whole; of shorter ones more would cost memory first.
  limits.variants = std::clamp<int64_t>(kStateBytes / model::RecurrentState::Bytes(config), 1,
                                        std::min(kMostVariants, 2 * limits.rows / rows + 1));
  limits.logit_rows = kMostLogitRows;
  if (config.family == model::Family::kVim) {  // both of its scans need the whole sequence
    limits.cut = false;
    limits.rows = std::max<int64_t>(limits.rows, config.vision.tokens());
  } else if (share) {
    limits.shared_rows = limits.rows / 4;
  }
  limits.layers = static_cast<int32_t>(
      std::clamp<int64_t>(kSliceWork / (work * limits.rows), 1, config.layers));
  return limits;
}

VariantSchedule::VariantSchedule(std::vector<VariantExtent> extents, int64_t rows,
                                 std::vector<int64_t> outputs, const PassLimits& limits)
    : extents_(std::move(extents)),
      rows_(rows),
      outputs_(std::move(outputs)),
      limits_(limits),
      order_(Indices(static_cast<int64_t>(extents_.size()))) {
  MS_CHECK(std::is_sorted(outputs_.begin(), outputs_.end()));
  for (const VariantExtent& extent : extents_) {
    MS_CHECK(extent.start >= 0 && extent.start < extent.rows && extent.rows <= rows);
    MS_CHECK(limits_.cut || extent.rows <= limits_.rows);
    MS_CHECK(outputs_.size() == 1 || extent.rows == rows);
  }
  if (limits_.shared_rows == 0) return;
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int32_t a, int32_t b) { return extents_[a].start < extents_[b].start; });
}

// Logits wanted of a variant's rows [begin, end).
int64_t VariantSchedule::LogitRows(int64_t variant_rows, int64_t begin, int64_t end) const {
  const auto from = [&](int64_t row) {  // how many lie at or after it
    return std::upper_bound(outputs_.begin(), outputs_.end(), variant_rows - 1 - row) -
           outputs_.begin();
  };
  return from(begin) - from(end);
}

// The last end <= `end` with which [begin, end) has at most `logit_rows` of them.
int64_t VariantSchedule::Cut(int64_t variant_rows, int64_t begin, int64_t end,
                             int64_t logit_rows) const {
  if (LogitRows(variant_rows, begin, end) <= logit_rows) return end;
  const auto first = std::upper_bound(outputs_.begin(), outputs_.end(), variant_rows - 1 - begin);
  return variant_rows - 1 - *(first - 1 - logit_rows);
}

// As many rows from `begin` on as there is room for; false if there is none.
bool VariantSchedule::Enter(int32_t variant, int64_t begin, bool starts, Pass& pass) {
  const int64_t rows = extents_[variant].rows;
  const int64_t room = limits_.rows - pass.rows;
  if (room <= 0 || static_cast<int64_t>(pass.parts.size()) >= limits_.variants) return false;
  const int64_t end =
      Cut(rows, begin, std::min(rows, begin + room), limits_.logit_rows - pass.logit_rows);
  if (end <= begin || (end < rows && !limits_.cut)) return false;
  pass.parts.push_back({variant, begin, end, starts});
  pass.rows += end - begin;
  pass.logit_rows += LogitRows(rows, begin, end);
  open_ = end < rows ? variant : -1;
  open_row_ = end;
  return true;
}

bool VariantSchedule::Next(Pass& pass) {
  pass = {};
  if (open_ >= 0) MS_CHECK(Enter(open_, open_row_, false, pass));
  const int64_t begin = limits_.shared_rows > 0 ? unchanged_ : 0;
  while (open_ < 0 && next_ < order_.size()) {
    // One that is far ahead waits until the unchanged input has come nearer.
    const bool far = extents_[order_[next_]].start - begin >= limits_.shared_rows;
    if (limits_.shared_rows > 0 && far) break;
    if (!Enter(order_[next_], begin, true, pass)) break;
    ++next_;
  }
  if (limits_.shared_rows > 0 && next_ < order_.size()) AddUnchanged(pass);
  return !pass.parts.empty();
}

// Towards the first change of the variants that have not started.
void VariantSchedule::AddUnchanged(Pass& pass) {
  const int64_t ahead = extents_[order_[next_]].start - unchanged_;
  const int64_t room = std::max(limits_.rows - pass.rows, limits_.shared_rows);
  const int64_t end =
      Cut(rows_, unchanged_, unchanged_ + std::min(ahead, room), limits_.logit_rows);
  if (end == unchanged_) return;
  pass.parts.push_back({kUnchanged, unchanged_, end, false});
  pass.rows += end - unchanged_;
  pass.logit_rows += LogitRows(rows_, unchanged_, end);
  unchanged_ = end;
}

ScheduleTotals TotalsOf(VariantSchedule schedule) {
  ScheduleTotals totals;
  VariantSchedule::Pass pass;
  while (schedule.Next(pass)) {
    ++totals.passes;
    totals.rows += pass.rows;
    totals.logit_rows += pass.logit_rows;
    totals.most_rows = std::max(totals.most_rows, pass.rows);
    totals.most_parts = std::max(totals.most_parts, static_cast<int64_t>(pass.parts.size()));
    totals.most_logit_rows = std::max(totals.most_logit_rows, pass.logit_rows);
  }
  return totals;
}

}  // namespace mambascope::explain
