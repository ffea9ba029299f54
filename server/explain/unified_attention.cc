#include "server/explain/unified_attention.h"

#include <algorithm>
#include <cmath>

#include "server/kernels/scan_backward.h"
#include "server/kernels/unified_map.h"

namespace mambascope::explain {
namespace {

// As in layer_attention.cc: a slice should take about 20 ms on two AVX2 cores.
constexpr int64_t kMapWork = int64_t{1} << 28;
constexpr int64_t kScanWork = int64_t{1} << 23;
constexpr int64_t kSliceFloats = int64_t{1} << 20;  // of single channels' maps

float Silu(float v) { return v / (1 + std::exp(-v)); }

}  // namespace

UnifiedAttention::UnifiedAttention(const HiddenAttentionSetup& setup)
    : config_(setup.config),
      reduction_(setup.reduction),
      target_(setup.target),
      by_map_(setup.all_rows ||
              (setup.target.spread && setup.reduction.how == v1::REDUCTION_ABS_MEAN)),
      prefix_(setup.prefix),
      scanned_(reduction_.how == v1::REDUCTION_TOP_K ? setup.tokens : prefix_),
      d_inner_(config_.d_inner),
      all_(Indices(config_.d_inner)),
      channels_(reduction_.channels) {
  if (setup.direction != v1::HiddenAttention::DIRECTION_BACKWARD) directions_.push_back(0);
  if (config_.directions() == 2 && setup.direction != v1::HiddenAttention::DIRECTION_FORWARD) {
    directions_.push_back(1);
  }
  const auto scans = static_cast<int64_t>(directions_.size());
  const bool top = reduction_.how == v1::REDUCTION_TOP_K;
  const int64_t members = top ? reduction_.top_k : static_cast<int64_t>(channels().size());
  const bool listed = top || !channels_.empty();
  // Heads share a map, which is made once where a piece is a head.
  const int64_t shared = config_.channels_per_map();
  const auto map_work = [&](int64_t length, int64_t channels_of_map) {
    const int64_t of_channel = config_.d_state / channels_of_map + 2 * config_.d_conv + 4;
    return scans * (length * (length + 1) / 2) * of_channel;
  };
  if (top)
    rank_ =
        Pieces::Cut(d_inner_, shared > 1 ? shared : d_inner_, map_work(scanned_, shared), kMapWork);
  if (!by_map_) {
    pieces_ = Pieces::Cut(members, members, scans * prefix_ * (config_.d_state + 4), kScanWork);
  } else {
    const int64_t group = listed || shared == 1 ? members : shared;
    pieces_ = Pieces::Cut(members, group, map_work(prefix_, listed ? 1 : shared), kMapWork);
    if (setup.kind == HiddenAttentionSetup::Kind::kChannels) {
      const int64_t fit = std::max<int64_t>(kSliceFloats / (prefix_ * prefix_), 1);
      pieces_.size = std::min(pieces_.size, fit);
    }
  }
}

int64_t UnifiedAttention::memory_bytes() const {
  int64_t maps = 0, rows = 0;
  if (rank_.count() > 0) maps = BatchFloats(scanned_, rank_.size) + 2 * rank_.size * scanned_;
  if (by_map_) {
    maps = std::max(maps, BatchFloats(prefix_, pieces_.size));
  } else {
    rows = pieces_.size * (3 * prefix_ + scanned_ + config_.d_state) +
           kAdjointGroup * (prefix_ + 16 * config_.d_state);
    if (config_.family == model::Family::kMamba2) rows += pieces_.size * prefix_;
  }
  return model::LayerActivationsBytes(config_, scanned_) +
         4 * (std::max(maps, rows) + d_inner_ * 4);
}

Work UnifiedAttention::work() const {
  Work work;
  work.forward_tokens = static_cast<double>(scanned_) / config_.layers;
  const auto scans = static_cast<double>(directions_.size());
  const auto maps_of = [&](double channels, int64_t tokens) {
    const double of_channel =
        static_cast<double>(config_.d_state) / config_.channels_per_map() + config_.d_conv;
    return scans * channels * of_channel * static_cast<double>(tokens * (tokens + 1) / 2);
  };
  const auto members = static_cast<double>(pieces_.channels);
  if (rank_.count() > 0) work.map += maps_of(static_cast<double>(d_inner_), scanned_);
  if (by_map_) {
    work.map += maps_of(members, prefix_);
  } else {
    work.scan += scans * members * static_cast<double>(prefix_) * config_.d_state;
  }
  return work;
}

void UnifiedAttention::Open(const Subject& subject, int32_t layer, const float* stream) {
  model_ = subject.model;
  pool_ = subject.pool;
  layer_ = layer;
  model::RunLayerOnce(*pool_, *model_, layer, stream, scanned_, model::LayerParts::kAll,
                      activations_);
  for (const int32_t direction : directions_) {
    scans_[direction] = model::ScanOf(*model_, layer, direction, activations_);
  }
}

float UnifiedAttention::Gate(int64_t token, int32_t channel) const {
  const model::InProjLayout layout = model::InProjLayoutOf(config_);
  const float gate = Silu(activations_.in[token * layout.stride + layout.z + channel]);
  if (config_.family == model::Family::kMamba2) {
    const int64_t group = channel / (d_inner_ / config_.groups);
    return gate * model_->weights().layer(layer_).mixer_norm[channel] *
           activations_.norm_scale[token * config_.groups + group];
  }
  return config_.family == model::Family::kVim && config_.vision.divide_out ? 0.5f * gate : gate;
}

kernels::ScanParameters UnifiedAttention::ScanOfMap(int32_t direction, int32_t map,
                                                    int64_t tokens) const {
  kernels::ScanParameters scan = scans_[direction];
  const int64_t group = map / (config_.maps() / config_.groups);
  scan.tokens = tokens;
  scan.B += group * config_.d_state;
  scan.C += group * config_.d_state;
  return scan;
}

std::span<const int32_t> UnifiedAttention::Members(int64_t piece) const {
  return channels().subspan(pieces_.begin(piece), PieceChannels(piece));
}

void UnifiedAttention::Rank(int64_t piece) {
  mass_.resize(d_inner_);
  const int64_t begin = rank_.begin(piece), count = rank_.end(piece) - begin;
  std::vector<double> parts(count * scanned_, 0);
  ForEachRow(std::span<const int32_t>(all_).subspan(begin, count), scanned_,
             [&](int64_t c, int64_t i, std::span<const float> row, double) {
               double sum = 0;
               for (const float value : row) sum += std::fabs(value);
               parts[c * scanned_ + i] = sum;
             });
  for (int64_t c = 0; c < count; ++c) {
    double sum = 0;
    for (int64_t i = 0; i < scanned_; ++i) sum += parts[c * scanned_ + i];
    mass_[begin + c] = sum;
  }
  if (piece + 1 == rank_.count()) channels_ = LargestFirst(mass_, reduction_.top_k);
}

void UnifiedAttention::AddMap(int64_t piece, float* map, std::span<double> constants) {
  const auto members = Members(piece);
  const bool absolute = reduction_.how == v1::REDUCTION_ABS_MEAN;
  const double scale = 1.0 / static_cast<double>(pieces_.channels);
  if (piece == 0) {
    std::fill_n(map, prefix_ * prefix_, 0.0f);
    std::fill(constants.begin(), constants.end(), 0);
  }
  ForEachRow(members, prefix_,
             [&](int64_t, int64_t i, std::span<const float> row, double constant) {
               float* const to = map + i * prefix_;
               const auto count = static_cast<int64_t>(row.size());
               kernels::AddRowTo(row.data(), count, absolute, to);
               constants[i] += scale * (absolute ? std::fabs(constant) : constant);
             });
  if (piece + 1 < pieces()) return;
  const auto factor = static_cast<float>(scale);
  pool_->Split(prefix_ * prefix_, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) map[e] *= factor;
  });
}

void UnifiedAttention::ChannelMaps(int64_t piece, float* maps, float* constants) {
  ForEachRow(Members(piece), prefix_,
             [&](int64_t c, int64_t i, std::span<const float> row, double constant) {
               float* const to = maps + (c * prefix_ + i) * prefix_;
               std::copy(row.begin(), row.end(), to);
               std::fill(to + row.size(), to + prefix_, 0.0f);
               constants[c * prefix_ + i] = static_cast<float>(constant);
             });
}

void UnifiedAttention::AddRow(int64_t piece, std::span<const float> weights, std::span<double> row,
                              double* constant) {
  const auto members = Members(piece);
  const auto count = static_cast<int64_t>(members.size());
  const bool absolute = reduction_.how == v1::REDUCTION_ABS_MEAN;
  const double scale = 1.0 / static_cast<double>(pieces_.channels);
  rows_.Reserve(prefix_ * count);
  std::vector<double> constants(count);
  TargetRows(members, weights, rows_.data(), constants);
  for (int64_t j = 0; j < prefix_; ++j) {
    double sum = 0;
    const float* values = rows_.data() + j * count;
    for (int64_t c = 0; c < count; ++c) sum += absolute ? std::fabs(values[c]) : values[c];
    row[j] += scale * sum;
  }
  for (const double value : constants) *constant += scale * (absolute ? std::fabs(value) : value);
}

void UnifiedAttention::ChannelRows(int64_t piece, std::span<const float> weights, float* rows,
                                   float* constants) {
  const auto members = Members(piece);
  const auto count = static_cast<int64_t>(members.size());
  rows_.Reserve(prefix_ * count);
  std::vector<double> sums(count);
  TargetRows(members, weights, rows_.data(), sums);
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t j = 0; j < prefix_; ++j) rows[c * prefix_ + j] = rows_[j * count + c];
    constants[c] = static_cast<float>(sums[c]);
  }
}

void UnifiedAttention::TargetRows(std::span<const int32_t> channels, std::span<const float> weights,
                                  float* rows, std::span<double> constants) {
  const auto count = static_cast<int64_t>(channels.size());
  const int64_t of_group = d_inner_ / config_.groups;
  std::fill_n(rows, prefix_ * count, 0.0f);
  std::fill(constants.begin(), constants.end(), 0);
  for (int64_t first = 0, last = 0; first < count; first = last) {
    const int64_t group = channels[first] / of_group;  // channels of one share B and C
    while (last < count && channels[last] / of_group == group) ++last;
    for (const int32_t direction : directions_) {
      AddDirectionRows(channels.subspan(first, last - first), direction, weights, rows + first,
                       count, constants.subspan(first, last - first));
    }
  }
}

// v^T alpha with v = the gates, times the weights of rows, of each channel: [prefix, channels] into
// scratch_.
void UnifiedAttention::AdjointOfGates(std::span<const int32_t> channels, int32_t direction,
                                      std::span<const float> weights) {
  const auto count = static_cast<int64_t>(channels.size());
  const int64_t shared = config_.channels_per_map();
  kernels::ScanParameters scan = scans_[direction];
  scan.tokens = prefix_;
  scratch_.Reserve(prefix_ * count);
  std::vector<int32_t> maps;  // by channel
  for (const int32_t channel : channels) maps.push_back(static_cast<int32_t>(channel / shared));
  if (target_.spread) {
    pool_->Split(prefix_, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t c = 0; c < count; ++c) {
          scratch_[i * count + c] = weights[i] == 0 ? 0 : weights[i] * Gate(i, channels[c]);
        }
      }
    });
    kernels::ScanAdjoint(*pool_, selection_.Of(scan, config_.groups, maps), scratch_.data(),
                         scratch_.data(), /*accumulate=*/false);
    return;
  }
  // One row of each head serves all of its channels.
  std::vector<int32_t> heads;
  std::vector<int64_t> place;
  for (const int32_t map : maps) {
    if (heads.empty() || heads.back() != map) heads.push_back(map);
    place.push_back(static_cast<int64_t>(heads.size()) - 1);
  }
  const auto width = static_cast<int64_t>(heads.size());
  heads_.Reserve(prefix_ * width);
  kernels::TargetRows(*pool_, selection_.Of(scan, config_.groups, heads),
                      Place(direction, target_.position, prefix_), false, heads_.data());
  std::vector<float> gates;
  for (const int32_t channel : channels) gates.push_back(Gate(target_.position, channel));
  pool_->Split(prefix_, 16, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      for (int64_t c = 0; c < count; ++c) {
        scratch_[j * count + c] = gates[c] * heads_[j * width + place[c]];
      }
    }
  });
}

void UnifiedAttention::AddDirectionRows(std::span<const int32_t> channels, int32_t direction,
                                        std::span<const float> weights, float* rows, int64_t stride,
                                        std::span<double> constants) {
  AdjointOfGates(channels, direction, weights);
  const auto count = static_cast<int64_t>(channels.size());
  const int64_t taps = config_.d_conv, width = config_.conv_channels();
  const model::BranchWeights& branch = model_->weights().layer(layer_).branches[direction];
  const float* input = activations_.branches[direction].c.data();
  pool_->Split(count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < prefix_; ++m) {
      const int64_t token = Place(direction, m, prefix_);
      float* const values = scratch_.data() + m * count;
      for (int64_t c = begin; c < end; ++c) {
        if (weights[token] != 0) {
          values[c] += weights[token] * Gate(token, channels[c]) *
                       branch.D[channels[c] / config_.channels_per_map()];
        }
        values[c] *= Slope(input[m * width + channels[c]]);
        if (branch.conv1d_bias != nullptr) {
          constants[c] += static_cast<double>(branch.conv1d_bias[channels[c]]) * values[c];
        }
      }
    }
    for (int64_t j = 0; j < prefix_; ++j) {
      float* const to = rows + Place(direction, j, prefix_) * stride;
      for (int64_t c = begin; c < end; ++c) {
        const float* tap = branch.conv1d + channels[c] * taps;
        for (int64_t k = 0; k < std::min(taps, prefix_ - j); ++k) {
          to[c] += tap[taps - 1 - k] * scratch_[(j + k) * count + c];
        }
      }
    }
  });
}

}  // namespace mambascope::explain
