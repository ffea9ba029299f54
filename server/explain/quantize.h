#pragma once

#include <cstdint>
#include <span>

namespace mambascope::explain {

// The 256 values scale (q - zero) that a slab of values is rounded to (DATA_TYPE_UINT8).
struct Grid {
  float scale = 1;
  float zero = 0;  // an integer, so that q - zero and a value of 0 within the range are exact
};

// The finest grid that is off by at most scale / 2 everywhere between the smallest and the largest
// of `values`, which are finite. Of a constant slab the grid holds the constant itself. The scale
// is never finer than 2^-22 of the largest magnitude: float32 has no numbers between those of such
// a grid.
Grid GridOf(std::span<const float> values);

// The nearest q; that of GridOf for the values it was given is within scale / 2 of each.
uint8_t Quantize(float value, const Grid& grid);

}  // namespace mambascope::explain
