#include "server/model/image_resample.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace mambascope::model {
namespace {

constexpr int kPrecision = 22;  // 32 bits less 8 of the pixel and 2 for weights beyond [0, 1]
constexpr int32_t kHalf = 1 << (kPrecision - 1);
constexpr int64_t kChannels = 3;

double Weight(ResampleFilter filter, double x) {
  x = std::abs(x);
  if (filter == ResampleFilter::kBilinear) return x < 1 ? 1 - x : 0;
  constexpr double a = -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

uint8_t Clip(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kPrecision, 0, 255)); }

}  // namespace

ResampleAxis PlanResampling(int64_t input, int64_t resized, int64_t start, int64_t count,
                            ResampleFilter filter) {
  ResampleAxis axis;
  axis.input = input;
  axis.outputs.resize(count);
  const double scale = static_cast<double>(input) / static_cast<double>(resized);
  const double widened = std::max(scale, 1.0);
  const double support = (filter == ResampleFilter::kBicubic ? 2.0 : 1.0) * widened;
  const double narrowing = 1 / widened;
  std::vector<double> exact;
  for (int64_t i = 0; i < count; ++i) {
    ResampleAxis::Output& output = axis.outputs[i];
    const int64_t at = start + i;
    if (at < 0 || at >= resized) continue;
    output.weights = static_cast<int32_t>(axis.weights.size());
    if (input == resized) {  // as it is: PIL skips the pass
      output.first = static_cast<int32_t>(at);
      output.count = 1;
      axis.weights.push_back(1 << kPrecision);
      continue;
    }
    const double center = (static_cast<double>(at) + 0.5) * scale;
    const int64_t low = std::max<int64_t>(static_cast<int64_t>(center - support + 0.5), 0);
    const int64_t high = std::min(static_cast<int64_t>(center + support + 0.5), input);
    exact.clear();
    double sum = 0;
    for (int64_t x = low; x < high; ++x) {
      exact.push_back(Weight(filter, (static_cast<double>(x) - center + 0.5) * narrowing));
      sum += exact.back();
    }
    output.first = static_cast<int32_t>(low);
    output.count = static_cast<int32_t>(high - low);
    for (double weight : exact) {
      if (sum != 0) weight /= sum;
      weight *= 1 << kPrecision;
      axis.weights.push_back(static_cast<int32_t>(weight < 0 ? weight - 0.5 : weight + 0.5));
    }
  }
  return axis;
}

Resampler::Resampler(ResampleAxis across, ResampleAxis down)
    : across_(std::move(across)), down_(std::move(down)), first_row_(down_.input) {
  for (const ResampleAxis::Output& output : down_.outputs) {
    if (output.count == 0) continue;
    first_row_ = std::min<int64_t>(first_row_, output.first);
    end_row_ = std::max<int64_t>(end_row_, output.first + output.count);
  }
  first_row_ = std::min(first_row_, end_row_);
  rows_.resize((end_row_ - first_row_) * static_cast<int64_t>(across_.outputs.size()) * kChannels);
}

void Resampler::AddRow(const uint8_t* rgb) noexcept {
  const int64_t row = next_row_++;
  if (row < first_row_ || row >= end_row_) return;
  const auto width = static_cast<int64_t>(across_.outputs.size());
  uint8_t* to = rows_.data() + (row - first_row_) * width * kChannels;
  for (const ResampleAxis::Output& output : across_.outputs) {
    const uint8_t* from = rgb + output.first * kChannels;
    const int32_t* weight = across_.weights.data() + output.weights;
    int32_t red = kHalf, green = kHalf, blue = kHalf;
    for (int32_t k = 0; k < output.count; ++k, from += kChannels) {
      red += from[0] * weight[k];
      green += from[1] * weight[k];
      blue += from[2] * weight[k];
    }
    *to++ = Clip(red);
    *to++ = Clip(green);
    *to++ = Clip(blue);
  }
}

std::vector<uint8_t> Resampler::Finish() const {
  const auto row = static_cast<int64_t>(across_.outputs.size()) * kChannels;
  std::vector<uint8_t> result(static_cast<int64_t>(down_.outputs.size()) * row);
  std::vector<int32_t> sums(row);
  uint8_t* to = result.data();
  for (const ResampleAxis::Output& output : down_.outputs) {
    std::ranges::fill(sums, kHalf);
    for (int32_t k = 0; k < output.count; ++k) {
      const uint8_t* from = rows_.data() + (output.first + k - first_row_) * row;
      const int32_t weight = down_.weights[output.weights + k];
      for (int64_t x = 0; x < row; ++x) sums[x] += from[x] * weight;
    }
    for (const int32_t sum : sums) *to++ = Clip(sum);
  }
  return result;
}

}  // namespace mambascope::model
