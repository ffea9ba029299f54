// The part of UnifiedAttention that makes whole maps: a few channels at a time, strip by strip of
// rows, which are used and forgotten.
#include <algorithm>
#include <cmath>

#include "server/explain/method.h"
#include "server/explain/unified_attention.h"
#include "server/kernels/unified_map.h"

namespace mambascope::explain {
namespace {

// Factors of maps that stand side by side, and channels made of them at a time.
constexpr int64_t kBatchFloats = int64_t{1} << 21;
constexpr int64_t kBatchMaps = 32;
constexpr int64_t kBatchChannels = 64;

int64_t BatchMaps(int64_t tokens, int64_t d_state) {
  return std::clamp<int64_t>(kBatchFloats / kernels::MapFactorsSize(tokens, d_state), 1,
                             kBatchMaps);
}
// Of a row of alpha.
int64_t Stride(int64_t tokens) {
  return (tokens + kernels::kMapStrip - 1) / kernels::kMapStrip * kernels::kMapStrip +
         kernels::kMapStrip;
}

}  // namespace

// A few channels and the maps that they are made of.
struct UnifiedAttention::Batch {
  std::vector<int32_t> maps;    // the layer's, of the channels
  std::vector<int64_t> map_of;  // by channel, its place among them
  // By direction, in its own order: [channels, tokens].
  const float *gates[2] = {}, *slopes[2] = {};
};

int64_t UnifiedAttention::BatchFloats(int64_t tokens, int64_t channels) const {
  const auto scans = static_cast<int64_t>(directions_.size());
  const int64_t batch = std::min(kBatchChannels, channels);
  // Neighbours share the map of a head; those of a list may each have their own.
  const int64_t shared = reduction_.how == v1::REDUCTION_CHANNELS ||
                                 (reduction_.how == v1::REDUCTION_TOP_K && channels == pieces_.size)
                             ? 1
                             : config_.channels_per_map();
  const int64_t maps_at_once =
      std::min(BatchMaps(tokens, config_.d_state), (batch - 1) / shared + (shared > 1 ? 2 : 1));
  const int64_t threads =
      std::min(kPlannedThreads, (tokens + kernels::kMapStrip - 1) / kernels::kMapStrip);
  const int64_t of_strip = scans * kernels::kMapStrip * (Stride(tokens) + config_.d_state) +
                           3 * (tokens + kernels::kMapStrip + config_.d_conv);
  return scans * maps_at_once * kernels::MapFactorsSize(tokens, config_.d_state) +
         2 * scans * batch * tokens + threads * of_strip;
}

float UnifiedAttention::Slope(float c) const {
  switch (config_.conv_activation) {
    case kernels::Activation::kSilu:
      return 1 / (1 + std::exp(-c));
    case kernels::Activation::kRelu:
      return c > 0 ? 1.0f : 0.0f;
    case kernels::Activation::kIdentity:
      break;
  }
  return 1;
}

int64_t UnifiedAttention::BatchOf(std::span<const int32_t> channels, int64_t tokens) const {
  const int64_t shared = config_.channels_per_map(), most = BatchMaps(tokens, config_.d_state);
  int64_t count = 0, maps = 0;
  for (const int32_t channel : channels) {
    if (count == 0 || channel / shared != channels[count - 1] / shared) ++maps;
    if (maps > most || count == kBatchChannels) break;
    ++count;
  }
  return count;
}

void UnifiedAttention::MakeBatch(std::span<const int32_t> channels, int64_t tokens, Batch& batch) {
  const int64_t size = kernels::MapFactorsSize(tokens, config_.d_state);
  batch.maps.clear();
  batch.map_of.clear();
  for (const int32_t channel : channels) {
    const int32_t map = channel / config_.channels_per_map();
    if (batch.maps.empty() || batch.maps.back() != map) batch.maps.push_back(map);
    batch.map_of.push_back(static_cast<int64_t>(batch.maps.size()) - 1);
  }
  const auto count = static_cast<int64_t>(batch.maps.size());
  for (const int32_t direction : directions_) {
    factors_[direction].Reserve(count * size);
    pool_->Run(count, [&](int64_t m) {
      kernels::FactorMap(ScanOfMap(direction, batch.maps[m], tokens), batch.maps[m],
                         {tokens, direction == 1}, factors_[direction].data() + m * size);
    });
  }
  GatherColumns(channels, tokens, batch);
}

void UnifiedAttention::GatherColumns(std::span<const int32_t> channels, int64_t tokens,
                                     Batch& batch) {
  const auto count = static_cast<int64_t>(channels.size());
  const int64_t size = count * tokens, width = config_.conv_channels();
  columns_.Reserve(2 * static_cast<int64_t>(directions_.size()) * size);
  float* gates = columns_.data();
  for (const int32_t direction : directions_) {
    float* const slopes = gates + size;
    batch.gates[direction] = gates;
    batch.slopes[direction] = slopes;
    const float* input = activations_.branches[direction].c.data();
    pool_->Split(tokens, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t token = Place(direction, i, tokens);
        for (int64_t c = 0; c < count; ++c) {
          gates[c * tokens + i] = Gate(token, channels[c]);
          slopes[c * tokens + i] = Slope(input[i * width + channels[c]]);
        }
      }
    });
    gates += 2 * size;
  }
}

// A strip of rows of every channel of the batch; channels that share a map come one after another.
void UnifiedAttention::StripRows(const Batch& batch, std::span<const int32_t> channels,
                                 int64_t tokens, int64_t strip, int64_t first, UseRow use) const {
  const kernels::MapStrips strips{tokens, false}, turned{tokens, true};
  const int64_t stride = Stride(tokens), taps = config_.d_conv;
  const int64_t begin = strips.begin(strip), end = strips.end(strip);
  const int64_t size = kernels::MapFactorsSize(tokens, config_.d_state);
  const auto& branches = model_->weights().layer(layer_).branches;
  Array<float> alpha[2], row(tokens), backward(tokens), scratch(tokens + taps + kernels::kMapStrip);
  for (const int32_t direction : directions_) {
    alpha[direction] = Array<float>(kernels::kMapStrip * stride);
  }
  for (size_t c = 0; c < channels.size(); ++c) {
    kernels::UnifiedChannel factors[2];
    for (const int32_t direction : directions_) {
      const model::BranchWeights& branch = branches[direction];
      const int32_t channel = channels[c], map = batch.maps[batch.map_of[c]];
      factors[direction] = {batch.gates[direction] + c * tokens,
                            batch.slopes[direction] + c * tokens,
                            branch.conv1d + channel * taps,
                            taps,
                            branch.D[map],
                            branch.conv1d_bias == nullptr ? 0 : branch.conv1d_bias[channel]};
      if (c > 0 && batch.map_of[c] == batch.map_of[c - 1]) continue;
      kernels::MapStripRows(
          ScanOfMap(direction, map, tokens), map, direction == 0 ? strips : turned,
          factors_[direction].data() + batch.map_of[c] * size,
          direction == 0 ? strip : strips.count() - 1 - strip, stride, alpha[direction].data());
    }
    for (int64_t i = begin; i < end; ++i) {
      int64_t filled = 0;
      double constant = 0;
      if (directions_[0] == 0) {
        constant += kernels::UnifiedRow(factors[0], alpha[0].data() + (i - begin) * stride, i,
                                        scratch.data(), row.data());
        filled = i + 1;
      }
      if (directions_.back() == 1) {  // the strip's last row is its first in the scan's order
        const int64_t place = tokens - 1 - i;
        constant += kernels::UnifiedRow(factors[1], alpha[1].data() + (end - 1 - i) * stride, place,
                                        scratch.data(), backward.data());
        std::fill(row.begin() + filled, row.end(), 0.0f);
        for (int64_t j = 0; j <= place; ++j) row[tokens - 1 - j] += backward[j];
        filled = tokens;
      }
      use(first + static_cast<int64_t>(c), i, std::span<const float>(row.data(), filled), constant);
    }
  }
}

void UnifiedAttention::ForEachRow(std::span<const int32_t> channels, int64_t tokens, UseRow use) {
  Batch batch;
  const int64_t strips = kernels::MapStrips{tokens, false}.count();
  for (int64_t first = 0; first < static_cast<int64_t>(channels.size());) {
    const auto members = channels.subspan(first, BatchOf(channels.subspan(first), tokens));
    MakeBatch(members, tokens, batch);
    pool_->Run(strips, [&](int64_t task) {  // long rows first
      StripRows(batch, members, tokens, strips - 1 - task, first, use);
    });
    first += static_cast<int64_t>(members.size());
  }
}

}  // namespace mambascope::explain
