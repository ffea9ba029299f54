#include "server/explain/layer_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/kernels/ssd_map.h"
#include "server/model/finite.h"

namespace mambascope::explain {
namespace {

// A slice should take about 20 ms on two AVX2 cores, so that it stays below 50 on half of that.
constexpr int64_t kGemmWork = int64_t{1} << 30;  // multiply-adds of mean maps
constexpr int64_t kMapWork = int64_t{1} << 29;   // of |alpha|, which no GEMM computes
constexpr int64_t kScanWork = int64_t{1} << 24;  // exponentials of scans

// Pieces are whole registers of every instruction set, and large ones whole groups of the scans.
constexpr int64_t kLanes = 16;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr int64_t kThreads = 16;  // as many are reckoned with where each has scratch of its own

// What the map kernels allocate beside the map, in floats: two blocks of channels factored for all
// tokens, and a strip of rows on each thread.
int64_t MapScratch(int64_t tokens, int64_t d_state) {
  const int64_t depth = std::max<int64_t>(RoundUp(256 / d_state, 16), 16) * d_state;
  constexpr int64_t kStrip = 64;
  return 4 * RoundUp(tokens, 128) * depth + kThreads * kStrip * depth + 2 * tokens * d_state;
}

}  // namespace

Pieces Pieces::Cut(int64_t channels, int64_t group, int64_t work_per_channel, int64_t budget) {
  const int64_t most =
      std::clamp<int64_t>(budget / std::max<int64_t>(work_per_channel, 1), 1, group);
  const int64_t count = (group + most - 1) / most;
  const int64_t even = (group + count - 1) / count;
  const int64_t multiple = even < kLanes ? 1 : even < 4 * kAdjointGroup ? kLanes : kAdjointGroup;
  return {channels, group, std::min(group, RoundUp(even, multiple))};
}

LayerAttention::LayerAttention(ChannelReduction reduction, Want want, bool relu,
                               const model::ModelConfig& config, int64_t tokens, int64_t prefix)
    : reduction_(std::move(reduction)),
      want_(want),
      relu_(relu),
      maps_(config.maps()),
      groups_(config.groups),
      d_state_(config.d_state),
      prefix_(prefix),
      scanned_(reduction_.how == v1::REDUCTION_TOP_K ? tokens : prefix),
      headed_(config.family == model::Family::kMamba2 && want == Want::kMap &&
              (reduction_.how == v1::REDUCTION_MEAN || reduction_.how == v1::REDUCTION_ABS_MEAN)),
      all_(Indices(config.maps())) {
  const bool absolute = reduction_.how == v1::REDUCTION_ABS_MEAN;
  const bool top = reduction_.how == v1::REDUCTION_TOP_K;
  const auto map_work = [&](int64_t length) { return length * (length + 1) / 2 * d_state_; };
  if (top) rank_ = Pieces::Cut(maps_, maps_ / groups_, map_work(tokens), kMapWork);
  channels_ = reduction_.channels;
  const int64_t members = top ? reduction_.top_k : static_cast<int64_t>(channels().size());
  // A list in any order may change its group with every channel.
  const bool listed = top || !channels_.empty();
  const int64_t group = groups_ == 1 ? members : listed ? 1 : maps_ / groups_;
  pieces_ = headed_ ? Pieces{members, members, members}
            : want == Want::kMap
                ? Pieces::Cut(members, group, map_work(prefix), absolute ? kMapWork : kGemmWork)
                : Pieces::Cut(members, group, prefix * d_state_, kScanWork);
}

int64_t LayerAttention::memory_bytes() const {
  const int64_t piece = std::max(rank_.size, pieces_.size);
  int64_t floats = scanned_ * maps_ + 3 * maps_ + d_state_ * maps_;
  if (std::min(piece, pieces_.size) < maps_) floats += piece * (scanned_ + d_state_);
  int64_t scratch = rank_.count() > 0 ? MapScratch(scanned_, d_state_) : 0;
  if (headed_) scratch = prefix_ * maps_ + kThreads * 64 * (maps_ + 128);
  if (want_ == Want::kMap) {
    if (!headed_) scratch = std::max(scratch, MapScratch(prefix_, d_state_));
    if (pieces_.count() > 1) floats += prefix_ * prefix_;
  } else {
    // Rows of a piece, or the kernels' sums over channel groups; a last incomplete group; states.
    const bool rows = want_ == Want::kChannelRows || reduction_.how == v1::REDUCTION_ABS_MEAN;
    floats += prefix_ * (rows ? pieces_.size : pieces_.size / kLanes + 2);
    floats += kAdjointGroup * (prefix_ + kThreads * d_state_);
  }
  return 4 * (floats + scratch);
}

void LayerAttention::Open(const Subject& subject, int32_t layer) {
  pool_ = subject.pool;
  const auto& model = *subject.model;
  whole_ = relu_ ? model.ReluScanParametersOf(*pool_, *subject.trace, layer, 0, scanned_, buffers_)
                 : model.ScanParametersOf(*pool_, *subject.trace, layer, 0, scanned_, buffers_);
  scan_ = whole_;
  scan_.tokens = prefix_;
}

kernels::ScanParameters LayerAttention::Select(const kernels::ScanParameters& scan,
                                               std::span<const int32_t> channels) {
  const auto count = static_cast<int64_t>(channels.size());
  bool adjacent = true;
  for (int64_t c = 0; c < count; ++c) adjacent = adjacent && channels[c] == channels[0] + c;
  if (adjacent && count == maps_ && groups_ == 1) return scan;
  const int64_t group = group_of(channels.front());
  MS_CHECK(group == group_of(channels.back()));
  piece_delta_.Reserve(count * scan.tokens);
  piece_A_.Reserve(count * d_state_);
  const auto gather = [&](const float* from, float* to) {
    if (adjacent) {
      std::memcpy(to, from + channels[0], count * sizeof(float));
    } else {
      for (int64_t c = 0; c < count; ++c) to[c] = from[channels[c]];
    }
  };
  for (int64_t i = 0; i < scan.tokens; ++i) {
    gather(scan.delta + i * maps_, piece_delta_.data() + i * count);
  }
  for (int64_t n = 0; n < d_state_; ++n) {
    gather(scan.A + n * maps_, piece_A_.data() + n * count);
  }
  kernels::ScanParameters selected = scan;
  selected.d_inner = count;
  selected.delta = piece_delta_.data();
  selected.A = piece_A_.data();
  selected.B += group * d_state_;
  selected.C += group * d_state_;
  return selected;
}

kernels::ScanParameters LayerAttention::Channels(std::span<const int32_t> channels) {
  return Select(scan_, channels);
}

std::span<const int32_t> LayerAttention::Members(int64_t piece) const {
  return channels().subspan(pieces_.begin(piece), pieces_.end(piece) - pieces_.begin(piece));
}

double LayerAttention::Weight(std::span<const int32_t> members) const {
  return static_cast<double>(members.size()) / static_cast<double>(pieces_.channels);
}

void LayerAttention::Rank(int64_t piece) {
  mass_.resize(maps_);
  const int64_t begin = rank_.begin(piece);
  const auto members = std::span<const int32_t>(all_).subspan(begin, rank_.end(piece) - begin);
  kernels::ChannelMass(*pool_, Select(whole_, members), mass_.data() + begin);
  if (piece + 1 < rank_.count()) return;
  for (float& mass : mass_) {  // what is not a number comes first, so that the result shows it
    if (std::isnan(mass)) mass = std::numeric_limits<float>::infinity();
  }
  channels_ = all_;
  const auto end = channels_.begin() + reduction_.top_k;
  std::partial_sort(channels_.begin(), end, channels_.end(), [&](int32_t a, int32_t b) {
    return mass_[a] != mass_[b] ? mass_[a] > mass_[b] : a < b;
  });
  channels_.erase(end, channels_.end());
}

void LayerAttention::AddMap(int64_t piece, float* map) {
  if (headed_) {
    const kernels::SsdMapInputs heads{prefix_, maps_,   groups_, d_state_,       scan_.delta,
                                      scan_.A, scan_.B, scan_.C, scan_.bc_stride};
    (absolute() ? kernels::SsdAbsMeanMap : kernels::SsdMeanMap)(*pool_, heads, map);
    return;
  }
  const auto members = Members(piece);
  const kernels::ScanParameters scan = Select(scan_, members);
  const int64_t size = prefix_ * prefix_;
  const bool alone = pieces_.count() == 1;
  if (!alone) part_.Reserve(size);
  float* const part = alone ? map : part_.data();
  (absolute() ? kernels::AbsMeanMap : kernels::MeanMap)(*pool_, scan, part);
  if (alone) return;
  const auto weight = static_cast<float>(Weight(members));
  pool_->Split(size, 1024, [&](int64_t begin, int64_t end) {
    if (piece == 0) {
      for (int64_t i = begin; i < end; ++i) map[i] = weight * part[i];
    } else {
      for (int64_t i = begin; i < end; ++i) map[i] += weight * part[i];
    }
  });
}

void LayerAttention::AddRow(int64_t piece, int64_t target, std::span<double> row) {
  const auto members = Members(piece);
  if (reduction_.how == v1::REDUCTION_ABS_MEAN) {
    const float* rows = Rows(members, target, false);
    const auto count = static_cast<int64_t>(members.size());
    const double scale = 1.0 / static_cast<double>(pieces_.channels);
    pool_->Split(prefix_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        double sum = 0;
        for (int64_t c = 0; c < count; ++c) sum += std::fabs(rows[j * count + c]);
        row[j] += scale * sum;
      }
    });
    return;
  }
  std::vector<float> one_hot(prefix_, 0.0f);
  one_hot[target] = 1;
  AddAdjoint(piece, one_hot.data(), row);
}

void LayerAttention::AddAdjoint(int64_t piece, const float* v, std::span<double> out) {
  const auto members = Members(piece);
  part_.Reserve(prefix_);
  kernels::MeanAdjoint(*pool_, Select(scan_, members), {}, v, part_.data());
  const double weight = Weight(members);
  for (int64_t j = 0; j < prefix_; ++j) out[j] += weight * part_[j];
}

void LayerAttention::AddRowSums(int64_t piece, std::span<double> out) {
  const auto members = Members(piece);
  const std::vector<float> ones(prefix_, 1.0f);
  part_.Reserve(prefix_);
  kernels::MeanForward(*pool_, Select(scan_, members), {}, ones.data(), part_.data());
  const double weight = Weight(members);
  for (int64_t i = 0; i < prefix_; ++i) out[i] += weight * part_[i];
}

void LayerAttention::AddExtremes(int64_t piece, int64_t target, bool quirks, std::span<double> mean,
                                 Extremes* extremes) {
  const auto members = Members(piece);
  const float* rows = Rows(members, target, quirks);
  const auto count = static_cast<int64_t>(members.size());
  if (piece == 0) *extremes = {rows[0], rows[0]};
  const double scale = 1.0 / static_cast<double>(pieces_.channels);
  for (int64_t j = 0; j < prefix_; ++j) {
    double sum = 0;
    for (int64_t c = 0; c < count; ++c) {
      const float value = rows[j * count + c];
      sum += value;
      extremes->low = std::min(extremes->low, value);
      extremes->high = std::max(extremes->high, value);
    }
    mean[j] += scale * sum;
  }
}

const float* LayerAttention::Rows(std::span<const int32_t> members, int64_t target, bool quirks) {
  part_.Reserve(prefix_ * static_cast<int64_t>(members.size()));
  kernels::TargetRows(*pool_, Select(scan_, members), target, quirks, part_.data());
  return part_.data();
}

absl::Status CheckFinite(absl::string_view method, int32_t layer, std::span<const float> values) {
  if (model::AllFinite(values.data(), static_cast<int64_t>(values.size()))) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat(method, ": layer ", layer, " is not finite"));
}

Axis TokensWithout(int64_t target, int64_t tokens) {
  Axis axis = {"input_tokens", tokens - 1, Indices(tokens)};
  axis.labels.erase(axis.labels.begin() + target);
  return axis;
}

void WriteRow(TensorWriter& writer, absl::string_view tensor, std::span<const float> row,
              int64_t tokens) {
  writer.Write(tensor, row);
  const std::vector<float> after(tokens - row.size(), 0.0f);
  writer.Write(tensor, std::span<const float>(after));
}

}  // namespace mambascope::explain
