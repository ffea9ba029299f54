#include "server/explain/layer_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
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

// Multiply-adds of one map.
int64_t MapWork(int64_t tokens, int64_t d_state) { return tokens * (tokens + 1) / 2 * d_state; }

// What the map kernels allocate beside the map, in floats: two blocks of channels factored for all
// tokens, and a strip of rows on each thread.
int64_t MapScratch(int64_t tokens, int64_t d_state) {
  const int64_t depth = std::max<int64_t>(RoundUp(256 / d_state, 16), 16) * d_state;
  constexpr int64_t kStrip = 64;
  return 4 * RoundUp(tokens, 128) * depth + kPlannedThreads * kStrip * depth + 2 * tokens * d_state;
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
                               const model::ModelConfig& config, int64_t tokens, int64_t prefix,
                               bool spread, Direction direction)
    : reduction_(std::move(reduction)),
      want_(want),
      relu_(relu),
      spread_(spread),
      maps_(config.maps()),
      groups_(config.groups),
      d_state_(config.d_state),
      prefix_(prefix),
      scanned_(reduction_.how == v1::REDUCTION_TOP_K ? tokens : prefix),
      headed_(config.family == model::Family::kMamba2 && makes_maps() &&
              (reduction_.how == v1::REDUCTION_MEAN || absolute())),
      all_(Indices(config.maps())) {
  if (direction != v1::HiddenAttention::DIRECTION_BACKWARD) directions_.push_back(0);
  if (config.directions() == 2 && direction != v1::HiddenAttention::DIRECTION_FORWARD) {
    directions_.push_back(1);
  }
  const auto scans = static_cast<int64_t>(directions_.size());
  const bool top = reduction_.how == v1::REDUCTION_TOP_K;
  const auto map_work = [&](int64_t length) { return scans * MapWork(length, d_state_); };
  if (top) rank_ = Pieces::Cut(maps_, maps_ / groups_, map_work(tokens), kMapWork);
  channels_ = reduction_.channels;
  const int64_t members = top ? reduction_.top_k : static_cast<int64_t>(channels().size());
  // A list in any order may change its group with every channel.
  const bool listed = top || !channels_.empty();
  const int64_t group = groups_ == 1 ? members : listed ? 1 : maps_ / groups_;
  pieces_ = headed_ ? Pieces{members, members, members}
            : makes_maps()
                ? Pieces::Cut(members, group, map_work(prefix), absolute() ? kMapWork : kGemmWork)
                : Pieces::Cut(members, group, scans * prefix * d_state_, kScanWork);
}

int64_t LayerAttention::memory_bytes() const {
  const int64_t piece = std::max(rank_.size, pieces_.size);
  const auto scans = static_cast<int64_t>(directions_.size());
  int64_t floats = scans * scanned_ * maps_ + 3 * maps_ + d_state_ * maps_;
  if (std::min(piece, pieces_.size) < maps_) floats += piece * (scanned_ + d_state_);
  int64_t scratch = rank_.count() > 0 ? MapScratch(scanned_, d_state_) : 0;
  if (headed_) scratch = prefix_ * maps_ + kPlannedThreads * 64 * (maps_ + 128);
  if (makes_maps()) {
    if (!headed_) scratch = std::max(scratch, MapScratch(prefix_, d_state_));
    if (directions_.back() == 1 || row_by_maps()) floats += prefix_ * prefix_;
    if (both() && absolute()) floats += 6 * prefix_;
  } else {
    // Rows of a piece, or the kernels' sums over channel groups; a last incomplete group; states.
    const bool rows = want_ == Want::kChannelRows || absolute();
    floats += prefix_ * (rows ? scans * pieces_.size : pieces_.size / kLanes + 2 + 2 * scans);
    floats += kAdjointGroup * (prefix_ + kPlannedThreads * d_state_);
  }
  return 4 * (floats + scratch);
}

Work LayerAttention::work() const {
  Work work;
  const auto scans = static_cast<double>(directions_.size());
  const auto members = static_cast<double>(pieces_.channels);
  const auto maps = static_cast<double>(maps_), states = static_cast<double>(d_state_);
  if (rank_.count() > 0) {
    work.map += scans * maps * static_cast<double>(MapWork(scanned_, d_state_));
  }
  if (headed_) {
    work.map +=
        static_cast<double>(MapWork(prefix_, 1)) * (static_cast<double>(groups_) * states + maps);
  } else if (makes_maps()) {
    work.map += scans * members * static_cast<double>(MapWork(prefix_, d_state_));
  } else {
    work.scan += scans * members * static_cast<double>(prefix_) * states;
  }
  return work;
}

void LayerAttention::Open(const Subject& subject, int32_t layer) {
  pool_ = subject.pool;
  const auto& model = *subject.model;
  for (const int32_t direction : directions_) {
    Scan& scan = scans_[direction];
    const auto parameters_of =
        relu_ ? &model::MambaModel::ReluScanParametersOf : &model::MambaModel::ScanParametersOf;
    scan.whole =
        (model.*parameters_of)(*pool_, *subject.trace, layer, direction, scanned_, scan.buffers);
    scan.prefix = scan.whole;
    scan.prefix.tokens = prefix_;
  }
}

kernels::ScanParameters LayerAttention::Channels(std::span<const int32_t> channels,
                                                 int32_t direction) {
  return selection_.Of(scans_[direction].prefix, groups_, channels);
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
  double* const mass = mass_.data() + begin;
  std::fill_n(mass, members.size(), 0);
  std::vector<float> of_direction(members.size());
  for (const int32_t direction : directions_) {
    kernels::ChannelMass(*pool_, selection_.Of(scans_[direction].whole, groups_, members),
                         of_direction.data());
    for (size_t c = 0; c < members.size(); ++c) mass[c] += of_direction[c];
  }
  if (both()) CorrectMass(members, mass);
  if (piece + 1 == rank_.count()) channels_ = LargestFirst(mass_, reduction_.top_k);
}

void LayerAttention::MakeMap(std::span<const int32_t> members, int32_t direction,
                             const kernels::MapPart& part, float* map) {
  if (headed_) {
    const kernels::ScanParameters& scan = scans_[0].prefix;
    const kernels::SsdMapInputs heads{prefix_, maps_,  groups_, d_state_,      scan.delta,
                                      scan.A,  scan.B, scan.C,  scan.bc_stride};
    (absolute() ? kernels::SsdAbsMeanMap : kernels::SsdMeanMap)(*pool_, heads, map);
    return;
  }
  const kernels::ScanParameters scan = OfGroup(scans_[direction].prefix, groups_, members);
  (absolute() ? kernels::PartOfAbsMeanMap : kernels::PartOfMeanMap)(*pool_, scan, part, map);
}

void LayerAttention::AddMap(int64_t piece, float* map) {
  const auto members = Members(piece);
  bool add = piece > 0;
  for (const int32_t direction : directions_) {
    const kernels::MapPart part = {members, pieces_.channels, add && direction == 0};
    if (direction == 0) {
      MakeMap(members, 0, part, map);
    } else {
      part_.Reserve(prefix_ * prefix_);
      MakeMap(members, 1, part, part_.data());
      AddTurned(*pool_, part_.data(), prefix_ * prefix_, /*overwrite=*/!add, map);
    }
    add = true;
  }
  if (both() && absolute()) SetDiagonal(piece, members, map);
}

// The two scans' maps meet on the diagonal alone, where |a + b| is not |a| + |b|.
template <class Use>
void LayerAttention::ForEachOwn(std::span<const int32_t> members, int64_t tokens, const Use& use) {
  for (int64_t i = 0; i < tokens; ++i) {
    double own[2];  // C_i . B_i
    const float* delta[2];
    for (const int32_t direction : {0, 1}) {
      const kernels::ScanParameters& scan = scans_[direction].whole;
      const int64_t row = direction == 0 ? i : tokens - 1 - i;
      own[direction] = 0;
      for (int64_t n = 0; n < d_state_; ++n) {
        own[direction] += static_cast<double>(scan.C[row * scan.bc_stride + n]) *
                          scan.B[row * scan.bc_stride + n];
      }
      delta[direction] = scan.delta + row * maps_;
    }
    for (size_t c = 0; c < members.size(); ++c) {
      use(i, c, own[0] * delta[0][members[c]], own[1] * delta[1][members[c]]);
    }
  }
}

void LayerAttention::SetDiagonal(int64_t piece, std::span<const int32_t> members, float* map) {
  if (piece == 0) diagonal_.assign(prefix_, 0);
  const double scale = 1.0 / static_cast<double>(pieces_.channels);
  ForEachOwn(members, prefix_, [&](int64_t i, size_t, double forward, double backward) {
    diagonal_[i] += scale * std::fabs(forward + backward);
  });
  for (int64_t i = 0; i < prefix_; ++i) map[i * prefix_ + i] = static_cast<float>(diagonal_[i]);
}

void LayerAttention::CorrectMass(std::span<const int32_t> members, double* mass) {
  std::vector<double> correction(members.size(), 0);
  ForEachOwn(members, scanned_, [&](int64_t, size_t c, double forward, double backward) {
    correction[c] += std::fabs(forward + backward) - std::fabs(forward) - std::fabs(backward);
  });
  for (size_t c = 0; c < members.size(); ++c) mass[c] += correction[c];
}

void LayerAttention::AddRow(int64_t piece, int64_t target, std::span<const float> v,
                            std::span<double> row) {
  if (!absolute()) {
    AddAdjoint(piece, v.data(), row);
    return;
  }
  const auto members = Members(piece);
  const auto count = static_cast<int64_t>(members.size());
  if (row_by_maps()) {
    part_.Reserve(prefix_ * prefix_);
    // Rows are spread where there is one scan only.
    MakeMap(members, 0, {members, pieces_.channels, false}, part_.data());
    pool_->Split(prefix_, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < prefix_; ++i) {
        const double scale = v[i];
        const int64_t last = std::min(end, i + 1);
        for (int64_t j = begin; j < last; ++j) row[j] += scale * part_[i * prefix_ + j];
      }
    });
    return;
  }
  const float* rows = Rows(members, target, false);
  const double scale = 1.0 / static_cast<double>(pieces_.channels);
  pool_->Split(prefix_, 1, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < count; ++c) sum += std::fabs(rows[j * count + c]);
      row[j] += scale * sum;
    }
  });
}

void LayerAttention::AddAdjoint(int64_t piece, const float* v, std::span<double> out) {
  const auto members = Members(piece);
  const double weight = Weight(members);
  part_.Reserve(prefix_);
  for (const int32_t direction : directions_) {
    const float* input = v;
    if (direction == 1) {
      turned_.Reserve(prefix_);
      std::reverse_copy(v, v + prefix_, turned_.data());
      input = turned_.data();
    }
    kernels::MeanAdjoint(*pool_, OfGroup(scans_[direction].prefix, groups_, members), members,
                         input, part_.data());
    for (int64_t j = 0; j < prefix_; ++j) out[j] += weight * part_[Place(direction, j)];
  }
}

void LayerAttention::AddRowSums(int64_t piece, std::span<double> out) {
  const auto members = Members(piece);
  const std::vector<float> ones(prefix_, 1.0f);
  const double weight = Weight(members);
  part_.Reserve(prefix_);
  for (const int32_t direction : directions_) {
    kernels::MeanForward(*pool_, OfGroup(scans_[direction].prefix, groups_, members), members,
                         ones.data(), part_.data());
    for (int64_t i = 0; i < prefix_; ++i) out[i] += weight * part_[Place(direction, i)];
  }
}

void LayerAttention::AddExtremes(int64_t piece, int64_t target, bool quirks, bool positive,
                                 std::span<double> mean, Extremes* extremes) {
  const auto members = Members(piece);
  const float* rows = Rows(members, target, quirks);
  const auto count = static_cast<int64_t>(members.size());
  const auto read = [&](int64_t at) { return positive ? std::max(rows[at], 0.0f) : rows[at]; };
  if (piece == 0) *extremes = {read(0), read(0)};
  const double scale = 1.0 / static_cast<double>(pieces_.channels);
  for (int64_t j = 0; j < prefix_; ++j) {
    double sum = 0;
    for (int64_t c = 0; c < count; ++c) {
      const float value = read(j * count + c);
      sum += value;
      extremes->low = std::min(extremes->low, value);
      extremes->high = std::max(extremes->high, value);
    }
    mean[j] += scale * sum;
  }
}

const float* LayerAttention::Rows(std::span<const int32_t> members, int64_t target, bool quirks) {
  const auto count = static_cast<int64_t>(members.size());
  part_.Reserve(prefix_ * count);
  for (const int32_t direction : directions_) {
    const bool direct = direction == 0;
    if (!direct) turned_.Reserve(prefix_ * count);
    float* const rows = direct ? part_.data() : turned_.data();
    kernels::TargetRows(*pool_, Channels(members, direction), Place(direction, target), quirks,
                        rows);
    if (direct) continue;
    for (int64_t j = 0; j < prefix_; ++j) {
      const float* from = rows + Place(1, j) * count;
      float* const to = part_.data() + j * count;
      for (int64_t c = 0; c < count; ++c) to[c] = both() ? to[c] + from[c] : from[c];
    }
  }
  return part_.data();
}

std::vector<int32_t> LargestFirst(std::span<const double> mass, int32_t count) {
  std::vector<double> keys(mass.begin(), mass.end());
  for (double& key : keys) {
    if (std::isnan(key)) key = std::numeric_limits<double>::infinity();
  }
  std::vector<int32_t> channels = Indices(static_cast<int64_t>(keys.size()));
  std::partial_sort(
      channels.begin(), channels.begin() + count, channels.end(),
      [&](int32_t a, int32_t b) { return keys[a] != keys[b] ? keys[a] > keys[b] : a < b; });
  channels.resize(count);
  return channels;
}

void AddTurned(ThreadPool& pool, const float* part, int64_t size, bool overwrite, float* map) {
  pool.Split(size, 1024, [&](int64_t begin, int64_t end) {
    if (overwrite) {
      for (int64_t i = begin; i < end; ++i) map[i] = part[size - 1 - i];
    } else {
      for (int64_t i = begin; i < end; ++i) map[i] += part[size - 1 - i];
    }
  });
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

void WriteCodeRow(TensorWriter& writer, absl::string_view tensor, std::vector<float> row,
                  int64_t target, int64_t tokens) {
  row.erase(row.begin() + target);
  for (float& value : row) value = std::max(value, 0.0f);
  WriteRow(writer, tensor, row, tokens - 1);
}

double MultiplyByRepeatedRow(std::span<const double> a, std::span<double> row) {
  double total = 0, mass = 0;
  for (const double value : a) total += value;
  for (const double value : row) mass += value;
  for (size_t j = 0; j < row.size(); ++j) row[j] = (row[j] + mass * a[j]) / (1 + total);
  return 1 + total;
}

}  // namespace mambascope::explain
