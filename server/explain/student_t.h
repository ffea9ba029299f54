#pragma once

#include <cmath>
#include <numbers>

namespace mambascope::explain {

// P(|T| <= t) for Student's t with whole degrees of freedom >= 1: the finite series of Abramowitz
// and Stegun, 26.7.3 and 26.7.4.
inline double StudentTwoSided(double t, int degrees) {
  const double angle = std::atan(t / std::sqrt(degrees)), cosine = std::cos(angle);
  const bool odd = degrees % 2 == 1;
  double sum = 0, term = odd ? cosine : 1;
  for (int k = odd ? 1 : 0; k <= degrees - 2; k += 2) {
    sum += term;
    term *= cosine * cosine * (k + 1) / (k + 2);
  }
  const double product = std::sin(angle) * sum;
  return odd ? 2 / std::numbers::pi * (angle + product) : product;
}

// The t that |T| stays below with probability 0.95.
inline double StudentT95(int degrees) {
  double low = 0, high = 16;  // 12.7 with one degree
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (StudentTwoSided(middle, degrees) < 0.95 ? low : high) = middle;
  }
  return high;
}

}  // namespace mambascope::explain
