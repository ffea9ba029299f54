#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/array.h"
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
// C, and no kernel call joins two groups.
//
// Of a sequence only the first `prefix` tokens are computed: a row sees no later token. The ranking
// of TOP_K alone goes over all `tokens`, so that a row is the row of the whole map.
class LayerAttention {
 public:
  enum class Want {
    kMap,          // AddMap
    kRow,          // AddRow, AddAdjoint, AddRowSums
    kChannelRows,  // AddExtremes
  };

  LayerAttention(ChannelReduction reduction, Want want, bool relu, const model::ModelConfig& config,
                 int64_t tokens, int64_t prefix);

  // Upper bound of what is allocated here and in the kernels; nothing is before Open.
  int64_t memory_bytes() const;

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
  // row[j] += Abar[target, j]; any reduction.
  void AddRow(int64_t piece, int64_t target, std::span<double> row);
  // out[j] += sum_i v[i] Abar[i, j]; not for ABS_MEAN, which is not linear.
  void AddAdjoint(int64_t piece, const float* v, std::span<double> out);
  // out[i] += sum_j Abar[i, j]; not for ABS_MEAN.
  void AddRowSums(int64_t piece, std::span<double> out);
  // Row `target` of alpha as it is: adds to the mean over channels and widens [low, high] to the
  // extreme entries of all channels. `quirks`: see kernels::TargetRows.
  struct Extremes {
    float low = 0, high = 0;
  };
  void AddExtremes(int64_t piece, int64_t target, bool quirks, std::span<double> mean,
                   Extremes* extremes);

  // The open layer's scan of the prefix; B and C are those of group 0.
  const kernels::ScanParameters& scan() const { return scan_; }
  // The same of some channels of one group, side by side, with the group's B and C. Valid until the
  // next call that takes a piece.
  kernels::ScanParameters Channels(std::span<const int32_t> channels);
  int64_t group_of(int32_t channel) const { return channel / (maps_ / groups_); }
  // Whether AddMap uses Mamba-2's own form of the map (kernels/ssd_map.h).
  bool headed() const { return headed_; }
  bool absolute() const { return reduction_.how == v1::REDUCTION_ABS_MEAN; }

 private:
  kernels::ScanParameters Select(const kernels::ScanParameters& scan,
                                 std::span<const int32_t> channels);
  // The channels of a piece, and how much of the mean they are.
  std::span<const int32_t> Members(int64_t piece) const;
  double Weight(std::span<const int32_t> members) const;
  // alpha[d, target, :] of the members, [prefix, members].
  const float* Rows(std::span<const int32_t> members, int64_t target, bool quirks);

  const ChannelReduction reduction_;
  const Want want_;
  const bool relu_;
  const int64_t maps_, groups_, d_state_, prefix_, scanned_;  // scanned_: tokens of whole_
  const bool headed_;
  const std::vector<int32_t> all_;  // every channel
  Pieces rank_, pieces_;

  ThreadPool* pool_ = nullptr;
  std::vector<int32_t> channels_;  // of CHANNELS and TOP_K
  kernels::ScanParameters whole_, scan_;
  std::vector<float> mass_;                 // of TOP_K: what channels are ranked by
  model::MambaModel::ScanBuffers buffers_;  // of whole_
  Array<float> piece_delta_;                // [scanned, channels of a piece]
  Array<float> piece_A_;                    // [d_state, channels of a piece]
  Array<float> part_;  // what a piece adds: a map, a row, or rows of its channels
};

// The adjoint scans work on this many channels side by side, and copy a group that is not full.
constexpr int64_t kAdjointGroup = 64;

// kInternal, naming method and layer, if a value is not finite: such a result is not evidence.
absl::Status CheckFinite(absl::string_view method, int32_t layer, std::span<const float> values);

// The axis of a variant that drops the target's own entry.
Axis TokensWithout(int64_t target, int64_t tokens);

// A row that ends with the target, and zeros for the tokens after it.
void WriteRow(TensorWriter& writer, absl::string_view tensor, std::span<const float> row,
              int64_t tokens);

}  // namespace mambascope::explain
