#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/array.h"
#include "server/explain/channel_selection.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/kernels/hidden_attention.h"
#include "server/model/config.h"

namespace mambascope::explain {

// A list of channels cut into consecutive pieces whose work is about one slice's. The list consists
// of groups of equal length, which no piece joins.
struct Pieces {
  // `channels` cut so that a piece's work stays within `budget`, if a single channel's does.
  static Pieces Cut(int64_t channels, int64_t group, int64_t work_per_channel, int64_t budget);
  int64_t count() const { return size == 0 ? 0 : channels / group * per_group(); }
  int64_t per_group() const { return (group + size - 1) / size; }
  int64_t begin(int64_t piece) const {
    return piece / per_group() * group + piece % per_group() * size;
  }
  int64_t end(int64_t piece) const {
    return std::min(begin(piece) + size, (piece / per_group() + 1) * group);
  }

  int64_t channels = 0, group = 1, size = 0;
};

// The reduced hidden attention of one layer after another (methods.md, sections 2 and 4), in parts:
//   Abar[i, j] = mean over the reduction's channels of alpha[d, i, j] (of |alpha| for ABS_MEAN)
// A mean adds up over pieces of its channels: a row is zero before the first piece, and map or row
// are complete after the last. Pieces are cut by the model's and the input's size alone, so threads
// and whatever runs between them change no bit.
//
// "Channels" are the layer's independent maps: of Mamba-2 its heads. Those of one group share B and
// C, and no kernel call joins two groups. Of Vim alpha is the sum of the maps of both scans, or one
// of them; the backward scan computes on tokens in its own order, the last one first, and what it
// gives is turned round on both axes.
//
// Of a sequence only the first `prefix` tokens are computed: a row sees no later token (of Vim all
// are). The ranking of TOP_K alone goes over all `tokens`, so that a row is the row of the whole
// map.
class LayerAttention {
 public:
  enum class Want {
    kMap,          // AddMap
    kRow,          // AddRow, AddAdjoint, AddRowSums
    kChannelRows,  // AddExtremes
  };
  using Direction = v1::HiddenAttention::Direction;

  // `spread`: rows are means of several (TargetRow), which takes maps for ABS_MEAN.
  LayerAttention(ChannelReduction reduction, Want want, bool relu, const model::ModelConfig& config,
                 int64_t tokens, int64_t prefix, bool spread = false,
                 Direction direction = v1::HiddenAttention::DIRECTION_BOTH);

  // Upper bound of what is allocated here and in the kernels; nothing is before Open.
  int64_t memory_bytes() const;
  // What all pieces of a layer compute.
  Work work() const;

  // Turns to a layer. The subject is borrowed until the next call.
  void Open(const Subject& subject, int32_t layer);

  // For TOP_K: every piece, once each and before all others. Then channels() are known.
  int64_t rank_pieces() const { return rank_.count(); }
  void Rank(int64_t piece);
  // The channels whose mean is taken; of TOP_K the best first.
  std::span<const int32_t> channels() const { return channels_.empty() ? all_ : channels_; }

  int64_t pieces() const { return pieces_.count(); }
  // map (+)= Abar's share from the piece. `map` [prefix, prefix]; piece 0 overwrites it.
  void AddMap(int64_t piece, float* map);
  // row[j] += sum_i v[i] Abar[i, j]; any reduction. v [prefix] is 1 at `target` and 0 elsewhere,
  // unless rows are spread.
  void AddRow(int64_t piece, int64_t target, std::span<const float> v, std::span<double> row);
  // out[j] += sum_i v[i] Abar[i, j], any v; not for ABS_MEAN, which is not linear.
  void AddAdjoint(int64_t piece, const float* v, std::span<double> out);
  // out[i] += sum_j Abar[i, j]; not for ABS_MEAN.
  void AddRowSums(int64_t piece, std::span<double> out);
  // Row `target` of alpha as it is: adds to the mean over channels and widens [low, high] to the
  // extreme entries of all channels. `quirks`: see kernels::TargetRows; `positive`: of alpha^+.
  struct Extremes {
    float low = 0, high = 0;
  };
  void AddExtremes(int64_t piece, int64_t target, bool quirks, bool positive,
                   std::span<double> mean, Extremes* extremes);

  // The scans that take part: 0 the forward one, 1 Vim's backward one.
  std::span<const int32_t> directions() const { return directions_; }
  // The open layer's scan of the prefix, tokens in its own order; B and C are those of group 0.
  const kernels::ScanParameters& scan(int32_t direction) const { return scans_[direction].prefix; }
  // The same of some channels of one group, side by side, with the group's B and C. Valid until the
  // next call that takes a piece or channels.
  kernels::ScanParameters Channels(std::span<const int32_t> channels, int32_t direction);
  int64_t group_of(int32_t channel) const { return channel / (maps_ / groups_); }
  // Where a token of the prefix stands in a direction's own order, and the other way round.
  int64_t Place(int32_t direction, int64_t token) const {
    return direction == 0 ? token : prefix_ - 1 - token;
  }
  // Whether AddMap uses Mamba-2's own form of the map (kernels/ssd_map.h).
  bool headed() const { return headed_; }
  bool absolute() const { return reduction_.how == v1::REDUCTION_ABS_MEAN; }

 private:
  struct Scan {
    model::MambaModel::ScanBuffers buffers;
    kernels::ScanParameters whole, prefix;
  };
  // The channels of a piece, and how much of the mean they are.
  std::span<const int32_t> Members(int64_t piece) const;
  double Weight(std::span<const int32_t> members) const;
  bool both() const { return directions_.size() == 2; }
  bool row_by_maps() const { return want_ == Want::kRow && spread_ && absolute(); }
  bool makes_maps() const { return want_ == Want::kMap || row_by_maps(); }
  // A part of the mean map of one direction, tokens in its own order; `members` are the part's.
  void MakeMap(std::span<const int32_t> members, int32_t direction, const kernels::MapPart& part,
               float* map);
  // Calls use(i, c, forward, backward) with alpha[members[c], i, i] of both scans, i < tokens.
  template <class Use>
  void ForEachOwn(std::span<const int32_t> members, int64_t tokens, const Use& use);
  void SetDiagonal(int64_t piece, std::span<const int32_t> members, float* map);
  void CorrectMass(std::span<const int32_t> members, double* mass);
  // alpha[d, target, :] of the members, [prefix, members].
  const float* Rows(std::span<const int32_t> members, int64_t target, bool quirks);

  const ChannelReduction reduction_;
  const Want want_;
  const bool relu_, spread_;
  const int64_t maps_, groups_, d_state_, prefix_, scanned_;  // scanned_: tokens of Scan::whole
  const bool headed_;
  const std::vector<int32_t> all_;  // every channel
  std::vector<int32_t> directions_;
  Pieces rank_, pieces_;

  ThreadPool* pool_ = nullptr;
  std::vector<int32_t> channels_;  // of CHANNELS and TOP_K
  Scan scans_[2];
  ChannelSelection selection_;
  std::vector<double> mass_;      // of TOP_K: what channels are ranked by
  std::vector<double> diagonal_;  // of both directions' absolute mean
  Array<float> part_;             // what a piece adds: a map, a row, or rows of its channels
  Array<float> turned_;           // of the backward scan, before it is turned round
};

// The `count` channels of the largest mass, best first; ties: lower index first. What is not a
// number comes first, so that the result shows it.
std::vector<int32_t> LargestFirst(std::span<const double> mass, int32_t count);

// map (+)= part turned round on both axes: a backward scan's map in the order of the tokens.
void AddTurned(ThreadPool& pool, const float* part, int64_t size, bool overwrite, float* map);

// The adjoint scans work on this many channels side by side, and copy a group that is not full.
constexpr int64_t kAdjointGroup = 64;

// kInternal, naming method and layer, if a value is not finite: such a result is not evidence.
absl::Status CheckFinite(absl::string_view method, int32_t layer, std::span<const float> values);

// The axis of a variant that drops the target's own entry.
Axis TokensWithout(int64_t target, int64_t tokens);

// A row that ends with the target, and zeros for the tokens after it.
void WriteRow(TensorWriter& writer, absl::string_view tensor, std::span<const float> row,
              int64_t tokens);

// The same of the published vision code: without the target's own entry, and clamped at 0.
void WriteCodeRow(TensorWriter& writer, absl::string_view tensor, std::vector<float> row,
                  int64_t target, int64_t tokens);

// row <- row (I + 1 a), every row divided by 1 + sum a, which it returns: the published vision
// code's rollout, where each row of a layer's matrix is `a`.
double MultiplyByRepeatedRow(std::span<const double> a, std::span<double> row);

}  // namespace mambascope::explain
