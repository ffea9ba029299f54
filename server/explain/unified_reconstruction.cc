// The identity of unified maps: out_proj's input = U x_in + constant, on the channels whose scan
// the trace recorded.
#include <vector>

#include "server/explain/reconstruction.h"
#include "server/explain/unified_attention.h"

namespace mambascope::explain {
namespace {

// x_in of the channels, [channels, tokens].
std::vector<float> ConvolutionInputs(const UnifiedAttention& unified,
                                     const model::ModelConfig& config,
                                     std::span<const int32_t> channels, int64_t tokens) {
  const model::InProjLayout layout = model::InProjLayoutOf(config);
  const float* in = unified.activations().in.data();
  std::vector<float> inputs(channels.size() * tokens);
  for (size_t c = 0; c < channels.size(); ++c) {
    for (int64_t i = 0; i < tokens; ++i) {
      inputs[c * tokens + i] = in[i * layout.stride + layout.x_in + channels[c]];
    }
  }
  return inputs;
}

}  // namespace

std::vector<int32_t> Reconstruction::ChannelsAt(std::span<const int64_t> places) const {
  std::vector<int32_t> channels;
  for (const int64_t place : places) {
    channels.push_back(subject_.trace->checked_channels[place]);
  }
  return channels;
}

double Reconstruction::RecordedMixed(int32_t layer, int64_t token, int64_t tokens, int64_t place,
                                     const UnifiedAttention& unified) const {
  double scanned = 0;
  for (const int32_t direction : unified.directions()) {
    const int64_t row = direction == 0 ? token : tokens - 1 - token;
    scanned += subject_.trace->layer(layer, direction).y_checked[row * checked_ + place];
  }
  return scanned * unified.Gate(token, subject_.trace->checked_channels[place]);
}

void Reconstruction::CheckUnifiedMaps(int32_t layer, UnifiedAttention& unified) {
  const int64_t tokens = unified.prefix();
  const std::vector<int64_t> places = Places(layer, MapChannels(d_inner_));
  const std::vector<int32_t> channels = ChannelsAt(places);
  const std::vector<float> inputs =
      ConvolutionInputs(unified, subject_.model->config(), channels, tokens);
  std::vector<double> rebuilt(channels.size() * tokens);
  unified.ForEachRow(channels, tokens,
                     [&](int64_t c, int64_t i, std::span<const float> row, double constant) {
                       double sum = constant;
                       const float* x_in = inputs.data() + c * tokens;
                       for (size_t j = 0; j < row.size(); ++j) {
                         sum += static_cast<double>(row[j]) * x_in[j];
                       }
                       rebuilt[c * tokens + i] = sum;
                     });
  Error error;
  for (size_t c = 0; c < places.size(); ++c) {
    for (int64_t i = 0; i < tokens; ++i) {
      error.Add(rebuilt[c * tokens + i], RecordedMixed(layer, i, tokens, places[c], unified));
    }
  }
  channels_ = static_cast<int64_t>(places.size());
  rows_ = tokens;
  Note(layer, error);
}

void Reconstruction::CheckUnifiedRow(int32_t layer, std::span<const float> weights,
                                     UnifiedAttention& unified) {
  const int64_t tokens = unified.prefix();
  const std::vector<int64_t> places = Places(layer, RowChannels(d_inner_));
  const std::vector<int32_t> channels = ChannelsAt(places);
  const std::vector<float> inputs =
      ConvolutionInputs(unified, subject_.model->config(), channels, tokens);
  const auto count = static_cast<int64_t>(channels.size());
  std::vector<float> rows(tokens * count);
  std::vector<double> rebuilt(count);  // begins with the constants
  unified.TargetRows(channels, weights, rows.data(), rebuilt);
  Error error;
  for (int64_t c = 0; c < count; ++c) {
    double recorded = 0;
    for (int64_t j = 0; j < tokens; ++j) {
      rebuilt[c] += static_cast<double>(rows[j * count + c]) * inputs[c * tokens + j];
      if (weights[j] != 0) {
        recorded += weights[j] * RecordedMixed(layer, j, tokens, places[c], unified);
      }
    }
    error.Add(rebuilt[c], recorded);
  }
  channels_ = count;
  rows_ = 1;
  Note(layer, error);
}

}  // namespace mambascope::explain
