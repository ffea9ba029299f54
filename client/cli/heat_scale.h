#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "client/cli/terminal.h"

namespace mambascope::cli {

// How values become colours, bars and marks: one linear scale for all values of a picture.
struct HeatScale {
  bool is_signed = false;  // some value is negative: blue - white - red; else white - red
  float limit = 0;         // |value| at which the scale ends; what lies beyond looks the same
  int64_t beyond = 0;      // how many lie beyond, infinities included
  int64_t not_numbers = 0;

  // In [-1, 1] (from 0 if not signed); 0 for what is no number.
  float Level(float value) const;
};

// Rows of rollout hold one entry that dwarfs the rest (the token's own), which would leave
// everything else white. So the largest 5 % of the values, at least one, do not stretch the scale
// if they are more than twice as large as all others.
HeatScale FitScale(std::span<const float> values);

struct Color {
  uint8_t red, green, blue;
};

// With 256 colours one of 15 that become darker step by step, which the nearest ones do not.
Color HeatColor(const Screen& screen, const HeatScale& scale, float value);

// The escape sequences; empty on a screen without colour.
std::string Background(const Screen& screen, Color color);
std::string Foreground(const Screen& screen, Color color);
// Black or white, whichever can be read on `background`.
std::string TextOn(const Screen& screen, Color background);
std::string Dim(const Screen& screen);
std::string Bold(const Screen& screen);
std::string Reset(const Screen& screen);

// A sign and four significant digits: "+0.01234".
std::string Number(float value);

// `width` columns: a bar as long as |value|; negative ones look different, those beyond the scale
// end in an arrow.
std::string Bar(const Screen& screen, const HeatScale& scale, float value, int width);

// One character that is the darker, the larger |value|.
char Shade(const HeatScale& scale, float value);

// What the colours mean, with the scale's ends in numbers.
std::string Legend(const Screen& screen, const HeatScale& scale);

}  // namespace mambascope::cli
