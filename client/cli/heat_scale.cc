#include "client/cli/heat_scale.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace mambascope::cli {
namespace {

constexpr Color kWhite = {247, 247, 247}, kRed = {178, 24, 43}, kBlue = {33, 102, 172};
// Out of xterm's palette, as it defines them.
constexpr Color kReds[] = {{255, 255, 255}, {255, 215, 215}, {255, 175, 175}, {255, 135, 135},
                           {255, 95, 95},   {255, 0, 0},     {215, 0, 0},     {175, 0, 0}};
constexpr Color kBlues[] = {{255, 255, 255}, {215, 215, 255}, {175, 215, 255}, {135, 175, 255},
                            {95, 175, 255},  {0, 135, 255},   {0, 95, 255},    {0, 95, 215}};
constexpr float kUnstretched = 0.05f;  // the share of the values that may lie beyond the scale
constexpr float kOutlier = 2;          // how many times the rest they are then

Color Mix(Color from, Color to, float share) {
  const auto mix = [&](uint8_t a, uint8_t b) {
    return static_cast<uint8_t>(std::lround(a + (b - a) * share));
  };
  return {mix(from.red, to.red), mix(from.green, to.green), mix(from.blue, to.blue)};
}

// Of a colour of xterm's 6 x 6 x 6 cube, whose levels are 0, 95, 135, ... 255.
int PaletteIndex(Color color) {
  const auto step = [](int level) { return level == 0 ? 0 : (level - 55) / 40; };
  return 16 + 36 * step(color.red) + 6 * step(color.green) + step(color.blue);
}

std::string Sequence(const Screen& screen, int plane, Color color) {
  if (!screen.color) return "";
  if (!screen.truecolor) return absl::StrFormat("\x1b[%d;5;%dm", plane, PaletteIndex(color));
  return absl::StrFormat("\x1b[%d;2;%d;%d;%dm", plane, color.red, color.green, color.blue);
}

}  // namespace

float HeatScale::Level(float value) const {
  if (std::isnan(value) || limit == 0) return 0;
  return std::clamp(value / limit, -1.0f, 1.0f);
}

HeatScale FitScale(std::span<const float> values) {
  HeatScale scale;
  std::vector<float> sizes;
  for (const float value : values) {
    if (std::isnan(value)) {
      ++scale.not_numbers;
      continue;
    }
    if (value < 0) scale.is_signed = true;
    // Zeros are mostly what causality forbids; they would make every value an outlier.
    if (value != 0 && std::isfinite(value)) sizes.push_back(std::abs(value));
  }
  if (!sizes.empty()) {
    const auto largest = std::max_element(sizes.begin(), sizes.end());
    scale.limit = *largest;
    const size_t dropped = std::ceil(static_cast<float>(sizes.size()) * kUnstretched);
    if (dropped < sizes.size()) {
      const auto kept = sizes.begin() + static_cast<std::ptrdiff_t>(dropped);
      std::nth_element(sizes.begin(), kept, sizes.end(), std::greater<>());
      if (scale.limit > kOutlier * *kept) scale.limit = *kept;
    }
  }
  scale.beyond = std::count_if(values.begin(), values.end(),
                               [&](float value) { return std::abs(value) > scale.limit; });
  return scale;
}

Color HeatColor(const Screen& screen, const HeatScale& scale, float value) {
  const float level = scale.Level(value), size = std::abs(level);
  if (screen.truecolor) return Mix(kWhite, level < 0 ? kBlue : kRed, size);
  const auto step = std::lround(size * static_cast<float>(std::size(kReds) - 1));
  return level < 0 ? kBlues[step] : kReds[step];
}

std::string Background(const Screen& screen, Color color) { return Sequence(screen, 48, color); }
std::string Foreground(const Screen& screen, Color color) { return Sequence(screen, 38, color); }

std::string TextOn(const Screen& screen, Color background) {
  const float light =
      0.299f * background.red + 0.587f * background.green + 0.114f * background.blue;
  return Foreground(screen, light > 140 ? Color{0, 0, 0} : Color{255, 255, 255});
}

std::string Dim(const Screen& screen) { return screen.color ? "\x1b[2m" : ""; }
std::string Bold(const Screen& screen) { return screen.color ? "\x1b[1m" : ""; }
std::string Reset(const Screen& screen) { return screen.color ? "\x1b[0m" : ""; }

std::string Number(float value) { return absl::StrFormat("%+.4g", value); }

std::string Bar(const Screen& screen, const HeatScale& scale, float value, int width) {
  const float level = scale.Level(value);
  const int length = static_cast<int>(std::lround(std::abs(level) * static_cast<float>(width)));
  const bool beyond = std::abs(value) > scale.limit && length > 0;
  const char* mark = screen.utf8 ? (level < 0 ? "\u2591" : "\u2588") : (level < 0 ? "-" : "#");
  std::string bar;
  for (int i = 0; i < length - (beyond ? 1 : 0); ++i) bar += mark;
  if (beyond) bar += '>';
  return bar;
}

char Shade(const HeatScale& scale, float value) {
  static constexpr char kRamp[] = " .:-=+*#%@";
  return kRamp[std::lround(std::abs(scale.Level(value)) * 9)];
}

std::string Legend(const Screen& screen, const HeatScale& scale) {
  constexpr int kCells = 16;
  const float first = scale.is_signed ? -scale.limit : 0;
  std::string legend = scale.is_signed ? Number(first) : "0";
  legend += ' ';
  for (int i = 0; i < kCells; ++i) {
    const float value = first + (scale.limit - first) * static_cast<float>(i) / (kCells - 1);
    if (screen.color) {
      absl::StrAppend(&legend, Background(screen, HeatColor(screen, scale, value)), " ");
    } else {
      legend += Shade(scale, value);
    }
  }
  absl::StrAppend(&legend, Reset(screen), " ", Number(scale.limit));
  if (scale.beyond > 0) absl::StrAppend(&legend, "; ", scale.beyond, " beyond the scale");
  if (scale.not_numbers > 0) absl::StrAppend(&legend, "; ", scale.not_numbers, " not a number");
  return legend;
}

}  // namespace mambascope::cli
