#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "server/base/array.h"
#include "server/explain/channel_selection.h"
#include "server/explain/hidden_attention_setup.h"
#include "server/explain/layer_attention.h"
#include "server/model/layer_activations.h"

namespace mambascope::explain {

// The unified map of one layer after another (methods.md, section 3; UIA, arXiv 2405.16504), for a
// channel d of d_inner:
//   U[d] = diag(post_d) diag(SiLU(z_d)) (alpha_d + D_d I) diag(phi(c_d)) W_conv,d
// so that out_proj's input is U x_in + constant, constant being the same product applied to the
// convolution's bias. Of Vim the two scans' products are added, each with its own convolution.
//
// Maps are made a few channels at a time and reduced row by row; a row of the target alone takes an
// adjoint scan and the transposed convolution, linear in the length. Channels are added in their
// order whatever the thread count, so it changes no bit.
class UnifiedAttention {
 public:
  explicit UnifiedAttention(const HiddenAttentionSetup& setup);

  // Upper bound of what is allocated here, in the layer's second run and in the kernels.
  int64_t memory_bytes() const;
  // What a layer computes.
  Work work() const;

  int64_t prefix() const { return prefix_; }
  // Tokens of the stream that Open reads.
  int64_t scanned() const { return scanned_; }
  // Turns to a layer, which is computed once more from the stream that enters it.
  void Open(const Subject& subject, int32_t layer, const float* stream);

  // For TOP_K, as in LayerAttention.
  int64_t rank_pieces() const { return rank_.count(); }
  void Rank(int64_t piece);
  std::span<const int32_t> channels() const { return channels_.empty() ? all_ : channels_; }

  int64_t pieces() const { return pieces_.count(); }
  // map (+)= the reduction's share of the piece, and its constants; complete after the last piece.
  // map [prefix, prefix], constants [prefix].
  void AddMap(int64_t piece, float* map, std::span<double> constants);
  // row += the same of the target's row. Not of ABS_MEAN with spread rows, whose row is one of
  // maps.
  void AddRow(int64_t piece, std::span<const float> weights, std::span<double> row,
              double* constant);
  // Of CHANNELS, the piece's maps [channels, prefix, prefix] and constants [channels, prefix], or
  // rows [channels, prefix] and constants [channels].
  void ChannelMaps(int64_t piece, float* maps, float* constants);
  void ChannelRows(int64_t piece, std::span<const float> weights, float* rows, float* constants);
  int64_t PieceChannels(int64_t piece) const { return pieces_.end(piece) - pieces_.begin(piece); }
  int64_t largest_piece() const { return pieces_.size; }

  // Any channels' rows, one after the other, in tasks that own rows: use(c, i, row, constant) for
  // every channels[c] and output token i, `row` up to the last entry that may differ from 0.
  using UseRow =
      absl::FunctionRef<void(int64_t c, int64_t i, std::span<const float> row, double constant)>;
  void ForEachRow(std::span<const int32_t> channels, int64_t tokens, UseRow use);
  // The target's row of any channels: rows [prefix, channels], constants [channels].
  void TargetRows(std::span<const int32_t> channels, std::span<const float> weights, float* rows,
                  std::span<double> constants);

  const model::LayerActivations& activations() const { return activations_; }
  std::span<const int32_t> directions() const { return directions_; }
  // post SiLU(z) of the channel at a token.
  float Gate(int64_t token, int32_t channel) const;

 private:
  struct Batch;
  int64_t Place(int32_t direction, int64_t token, int64_t tokens) const {
    return direction == 0 ? token : tokens - 1 - token;
  }
  std::span<const int32_t> Members(int64_t piece) const;
  // f(c) / c of the convolution's activation, frozen.
  float Slope(float c) const;
  // What a batch of maps and its strips allocate.
  int64_t BatchFloats(int64_t tokens, int64_t channels) const;
  // How many of the first channels fit into one batch of maps.
  int64_t BatchOf(std::span<const int32_t> channels, int64_t tokens) const;
  void MakeBatch(std::span<const int32_t> channels, int64_t tokens, Batch& batch);
  void GatherColumns(std::span<const int32_t> channels, int64_t tokens, Batch& batch);
  void AdjointOfGates(std::span<const int32_t> channels, int32_t direction,
                      std::span<const float> weights);
  // rows [prefix, stride]
  void AddDirectionRows(std::span<const int32_t> channels, int32_t direction,
                        std::span<const float> weights, float* rows, int64_t stride,
                        std::span<double> constants);
  void StripRows(const Batch& batch, std::span<const int32_t> channels, int64_t tokens,
                 int64_t strip, int64_t first, UseRow use) const;
  // The first tokens of a direction's scan with the B and C of a map's group.
  kernels::ScanParameters ScanOfMap(int32_t direction, int32_t map, int64_t tokens) const;

  const model::ModelConfig& config_;
  const ChannelReduction reduction_;
  const TargetRow target_;
  const bool by_map_;  // maps are made, all rows or to reduce them
  const int64_t prefix_, scanned_, d_inner_;
  const std::vector<int32_t> all_;
  std::vector<int32_t> directions_, channels_;
  Pieces rank_, pieces_;

  const model::MambaModel* model_ = nullptr;
  ThreadPool* pool_ = nullptr;
  int32_t layer_ = 0;
  model::LayerActivations activations_;
  std::vector<double> mass_;
  ChannelSelection selection_;
  kernels::ScanParameters scans_[2];  // of the open layer
  Array<float> factors_[2];           // of a batch's maps
  Array<float> columns_;              // of a batch: gate and slopes by channel
  Array<float> rows_;                 // of a piece
  Array<float> scratch_;              // of a direction
  Array<float> heads_;                // rows of alpha
};

}  // namespace mambascope::explain
