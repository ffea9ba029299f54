#include "server/explain/reconstruction.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "server/base/array.h"
#include "server/kernels/hidden_attention.h"
#include "server/kernels/scan_backward.h"
#include "server/kernels/ssd_map.h"

namespace mambascope::explain {
namespace {

// Sums of the same fp32 terms in another order. Measured: at most 5e-7 of the largest |y| for maps
// and 2e-6 for single rows, over the golden models, the demo model up to 3000 tokens and 200 random
// models; the excess is room for other machines and longer inputs. A wrong token, decay or channel
// shows as 1e-3 or more.
constexpr float kTolerance = 1e-4f;

// sum_j map[j] v[j] over a row, in eight partial sums that fill registers.
double Dot(const float* map, const float* v, int64_t count) {
  std::array<double, 8> sums = {};
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
    for (int64_t k = 0; k < 8; ++k) {
      sums[k] += static_cast<double>(map[j + k]) * static_cast<double>(v[j + k]);
    }
  }
  double sum = 0;
  for (; j < count; ++j) sum += static_cast<double>(map[j]) * static_cast<double>(v[j]);
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace

// So few that it costs a few percent of the layer's explanation in all but tiny models. Maps are
// dearer: MeanMap works on 16 channels at a time even when it is asked for one, and ChannelMaps
// writes as much as it computes.
int64_t Reconstruction::RowChannels(int64_t d_inner) {
  return std::clamp<int64_t>(d_inner / 48, 4, 32);
}
int64_t Reconstruction::MapChannels(int64_t d_inner) {
  return std::clamp<int64_t>(d_inner / 384, 1, 4);
}

Reconstruction::Reconstruction(const Subject& subject)
    : subject_(subject),
      d_inner_(subject.model->config().d_inner),
      checked_(static_cast<int64_t>(subject.trace->checked_channels.size())) {}

Reconstruction::Maps Reconstruction::MapsOf(const LayerAttention& attention) {
  return attention.headed() ? Maps::kHeaded : attention.absolute() ? Maps::kChannel : Maps::kMean;
}

int64_t Reconstruction::MemoryBytes(const model::ModelConfig& config, int64_t prefix) {
  const int64_t channels = RowChannels(config.d_inner);
  constexpr int64_t kVectors = 4;
  return 4 * (prefix * (3 * channels + kAdjointGroup + kVectors) +
              config.d_state * (channels + kPlannedThreads * kAdjointGroup));
}

Work Reconstruction::MapsWork(const model::ModelConfig& config, int64_t prefix) {
  Work work;
  constexpr double kSideBySide = 16;  // channels that MeanMap computes even for one
  work.map = static_cast<double>(config.directions() * MapChannels(config.d_inner)) * kSideBySide *
             static_cast<double>(prefix * (prefix + 1) / 2) * config.d_state;
  return work;
}

Work Reconstruction::RowWork(const model::ModelConfig& config, int64_t prefix) {
  Work work;
  work.scan = static_cast<double>(config.directions() * prefix) *
              static_cast<double>(RowChannels(config.d_inner)) * config.d_state;
  return work;
}

std::vector<int64_t> Reconstruction::Places(int32_t layer, int64_t count) const {
  count = std::min(count, checked_);
  std::vector<int64_t> places;
  // Another start in every layer, so that few channels a layer still are many in all.
  for (int64_t k = 0; k < count; ++k) places.push_back((k * checked_ / count + layer) % checked_);
  return places;
}

float Reconstruction::Skip(int32_t layer, int32_t direction, int64_t place) const {
  return subject_.model->weights().layer(layer).branches[direction].D[MapOf(place)];
}

int32_t Reconstruction::MapOf(int64_t place) const {
  return subject_.trace->checked_channels[place] / subject_.model->config().channels_per_map();
}

void Reconstruction::Error::Add(double rebuilt, double recorded) {
  const double error = std::fabs(rebuilt - recorded);
  // Whatever is not a number stays one: std::max would lose it.
  if (!(error <= difference)) difference = std::isnan(difference) ? difference : error;
  largest = std::max(largest, std::fabs(recorded));
}

void Reconstruction::Note(int32_t layer, const Error& error) {
  const auto relative =
      static_cast<float>(error.largest == 0 ? error.difference : error.difference / error.largest);
  const auto [entry, first] = errors_.try_emplace(layer, relative);
  if (!first && !(relative <= entry->second) && !std::isnan(entry->second)) {
    entry->second = relative;
  }
}

void Reconstruction::CheckMaps(int32_t layer, Maps maps, LayerAttention& attention,
                               float* scratch) {
  const bool by_state = maps == Maps::kStates || maps == Maps::kDecays;
  const std::vector<int64_t> places = Places(layer, by_state ? 1 : MapChannels(d_inner_));
  channels_ = static_cast<int64_t>(places.size());
  for (const int32_t direction : attention.directions()) {
    rows_ = attention.scan(direction).tokens;
    CheckMapsOf(layer, direction, maps, places, attention, scratch);
  }
}

void Reconstruction::CheckMapsOf(int32_t layer, int32_t direction, Maps maps,
                                 const std::vector<int64_t>& places, LayerAttention& attention,
                                 float* scratch) {
  const int64_t tokens = attention.scan(direction).tokens;
  const auto& trace = subject_.trace->layer(layer, direction);
  Error error;
  std::vector<float> input(tokens);
  std::vector<double> rebuilt(tokens);
  for (const int64_t place : places) {
    const std::array<int32_t, 1> channel = {MapOf(place)};
    const kernels::ScanParameters scan = attention.Channels(channel, direction);
    const auto x = [&](int64_t j) { return trace.x_checked[j * checked_ + place]; };
    // rebuilt[i] += q[i] sum_j map[i, j] input[j]
    const auto add_map = [&](const float* q, int64_t q_stride) {
      subject_.pool->Split(tokens, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const double sum = Dot(scratch + i * tokens, input.data(), i + 1);
          rebuilt[i] += q == nullptr ? sum : q[i * q_stride] * sum;
        }
      });
    };
    for (int64_t i = 0; i < tokens; ++i) {
      rebuilt[i] = static_cast<double>(Skip(layer, direction, place)) * x(i);
      input[i] = x(i);
    }
    constexpr std::array<int32_t, 1> kOnly = {0};
    if (maps == Maps::kMean) {
      kernels::MeanMap(*subject_.pool, scan, scratch);
      add_map(nullptr, 0);
    } else if (maps == Maps::kHeaded) {
      kernels::SsdMeanMap(
          *subject_.pool,
          {tokens, 1, 1, scan.d_state, scan.delta, scan.A, scan.B, scan.C, scan.bc_stride},
          scratch);
      add_map(nullptr, 0);
    } else if (maps == Maps::kChannel) {
      kernels::ChannelMaps(*subject_.pool, scan, kOnly, scratch);
      add_map(nullptr, 0);
    } else {
      for (int32_t n = 0; n < scan.d_state; ++n) {
        const std::array<int32_t, 1> state = {n};
        if (maps == Maps::kStates) {
          kernels::StateMaps(*subject_.pool, scan, 0, state, scratch);
          add_map(nullptr, 0);
          continue;
        }
        for (int64_t j = 0; j < tokens; ++j) {
          input[j] = scan.delta[j] * scan.B[j * scan.bc_stride + n] * x(j);
        }
        kernels::DecayMaps(*subject_.pool, scan, 0, state, scratch);
        add_map(scan.C + n, scan.bc_stride);
      }
    }
    for (int64_t i = 0; i < tokens; ++i) {
      error.Add(rebuilt[i], trace.y_checked[i * checked_ + place]);
    }
  }
  Note(layer, error);
}

void Reconstruction::CheckRow(int32_t layer, const TargetRow& target,
                              std::span<const float> weights, LayerAttention& attention) {
  const std::vector<int64_t> places = Places(layer, RowChannels(d_inner_));
  channels_ = static_cast<int64_t>(places.size());
  rows_ = 1;
  for (const int32_t direction : attention.directions()) {
    CheckRowOf(layer, direction, target, weights, places, attention);
  }
}

void Reconstruction::CheckRowOf(int32_t layer, int32_t direction, const TargetRow& target,
                                std::span<const float> weights, const std::vector<int64_t>& places,
                                LayerAttention& attention) {
  const auto& trace = subject_.trace->layer(layer, direction);
  const auto count = static_cast<int64_t>(places.size());
  const int64_t tokens = attention.scan(direction).tokens;
  const int64_t row = attention.Place(direction, target.position);
  Error error;
  // Channels of one group at a time: they share B and C.
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    std::vector<int32_t> channels;
    const int64_t group = attention.group_of(MapOf(places[begin]));
    for (; end < count && attention.group_of(MapOf(places[end])) == group; ++end) {
      channels.push_back(MapOf(places[end]));
    }
    const kernels::ScanParameters scan = attention.Channels(channels, direction);
    Array<float> rows(tokens * scan.d_inner);
    if (target.spread) {
      for (int64_t i = 0; i < tokens; ++i) {
        std::fill_n(rows.data() + i * scan.d_inner, scan.d_inner, weights[i]);
      }
      kernels::ScanAdjoint(*subject_.pool, scan, rows.data(), rows.data(), /*accumulate=*/false);
    } else {
      kernels::TargetRows(*subject_.pool, scan, row, /*without_target_decay=*/false, rows.data());
    }
    for (int64_t k = begin; k < end; ++k) {
      const float* x = trace.x_checked.data() + places[k];
      const float* y = trace.y_checked.data() + places[k];
      const double skip = Skip(layer, direction, places[k]);
      double rebuilt = 0, recorded = 0;
      for (int64_t j = 0; j < tokens; ++j) {
        const double weight = target.spread ? weights[j] : j == row ? 1 : 0;
        rebuilt += (rows[j * scan.d_inner + k - begin] + weight * skip) * x[j * checked_];
        if (weight != 0) recorded += weight * y[j * checked_];
      }
      error.Add(rebuilt, recorded);
    }
  }
  Note(layer, error);
}

void Reconstruction::Report(v1::Quality* quality) const {
  auto* report = quality->mutable_reconstruction();
  report->set_channels_compared(static_cast<int32_t>(channels_));
  report->set_rows_compared(static_cast<int32_t>(rows_));
  bool within = true;
  for (const auto& [layer, error] : errors_) {
    report->add_layers(layer);
    report->add_relative_error_by_layer(error);
    within = within && error <= kTolerance;  // false if it is not a number
  }
  quality->set_tolerance(kTolerance);
  quality->set_within_tolerance(within);
}

}  // namespace mambascope::explain
