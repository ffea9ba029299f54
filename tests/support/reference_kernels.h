#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "server/kernels/activation.h"

// The kernels once more, slow and plain, in double: methods.md section 1 word for word.
namespace mambascope::reference {

inline std::vector<float> Random(int64_t count, uint32_t seed, float low = -1, float high = 1) {
  std::mt19937 bits(seed);
  std::uniform_real_distribution<float> value(low, high);
  std::vector<float> numbers(count);
  for (float& number : numbers) number = value(bits);
  return numbers;
}

inline double Sigmoid(double v) { return 1 / (1 + std::exp(-v)); }
inline double Silu(double v) { return v * Sigmoid(v); }
inline double Softplus(double v) { return std::max(v, 0.0) + std::log1p(std::exp(-std::abs(v))); }
inline double Activate(kernels::Activation activation, double v) {
  switch (activation) {
    case kernels::Activation::kSilu:
      return Silu(v);
    case kernels::Activation::kRelu:
      return std::max(v, 0.0);
    case kernels::Activation::kIdentity:
      break;
  }
  return v;
}

// y = x w^T + bias; `bias` may be empty.
inline std::vector<double> Linear(std::span<const float> x, std::span<const float> w,
                                  std::span<const float> bias, int64_t M, int64_t N, int64_t K) {
  std::vector<double> y(M * N);
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t n = 0; n < N; ++n) {
      double sum = bias.empty() ? 0.0 : bias[n];
      for (int64_t k = 0; k < K; ++k) sum += double{x[m * K + k]} * w[n * K + k];
      y[m * N + n] = sum;
    }
  }
  return y;
}

inline std::vector<double> RmsNorm(std::span<const float> h, std::span<const float> weight,
                                   double eps) {
  const size_t cols = weight.size();
  std::vector<double> u(h.size());
  for (size_t row = 0; row < h.size(); row += cols) {
    double squares = 0;
    for (size_t m = 0; m < cols; ++m) squares += double{h[row + m]} * h[row + m];
    const double scale = 1 / std::sqrt(squares / cols + eps);
    for (size_t m = 0; m < cols; ++m) u[row + m] = weight[m] * (h[row + m] * scale);
  }
  return u;
}

// One sequence; `conv_state` [taps - 1, channels] is updated.
inline std::vector<double> CausalConv1d(std::span<const float> x_in, std::span<const float> weight,
                                        std::span<const float> bias, int64_t channels, int64_t taps,
                                        kernels::Activation activation,
                                        std::vector<float>& conv_state) {
  std::vector<float> inputs = conv_state;  // then the tokens
  inputs.insert(inputs.end(), x_in.begin(), x_in.end());
  const int64_t tokens = static_cast<int64_t>(x_in.size()) / channels;
  std::vector<double> x(x_in.size());
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t d = 0; d < channels; ++d) {
      double c = bias.empty() ? 0.0 : bias[d];
      for (int64_t k = 0; k < taps; ++k) {
        c += double{weight[d * taps + k]} * inputs[(i + k) * channels + d];
      }
      x[i * channels + d] = Activate(activation, c);
    }
  }
  conv_state.assign(inputs.end() - (taps - 1) * channels, inputs.end());
  return x;
}

struct Scanned {
  std::vector<double> gated, y, ssm_state;
};

// One sequence. x, dt, z [tokens, D]; A, ssm_state [N, D]; B, C [tokens, N].
inline Scanned SelectiveScan(std::span<const float> x, std::span<const float> dt,
                             std::span<const float> z, std::span<const float> A,
                             std::span<const float> B, std::span<const float> C,
                             std::span<const float> skip, std::span<const float> ssm_state) {
  const int64_t D = static_cast<int64_t>(skip.size()), N = static_cast<int64_t>(A.size()) / D;
  const int64_t tokens = static_cast<int64_t>(x.size()) / D;
  Scanned out{std::vector<double>(x.size()), std::vector<double>(x.size()),
              std::vector<double>(ssm_state.begin(), ssm_state.end())};
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t d = 0; d < D; ++d) {
      const double delta = Softplus(dt[i * D + d]);
      double y = 0;
      for (int64_t n = 0; n < N; ++n) {
        double& state = out.ssm_state[n * D + d];
        state = std::exp(delta * A[n * D + d]) * state + delta * B[i * N + n] * x[i * D + d];
        y += C[i * N + n] * state;
      }
      out.y[i * D + d] = y;
      out.gated[i * D + d] = (y + skip[d] * double{x[i * D + d]}) * Silu(z[i * D + d]);
    }
  }
  return out;
}

struct SsdShape {
  int64_t heads, head_dim, groups, d_state;
};

// One sequence of Mamba-2. x, z [tokens, heads head_dim]; B, C [tokens, groups d_state]; dt
// [tokens, heads]; dt_bias, A, skip [heads]; ssm_state [heads, d_state, head_dim].
inline Scanned SsdScan(const SsdShape& shape, std::span<const float> x, std::span<const float> B,
                       std::span<const float> C, std::span<const float> dt,
                       std::span<const float> dt_bias, double delta_min, double delta_max,
                       std::span<const float> A, std::span<const float> skip,
                       std::span<const float> z, std::span<const float> ssm_state) {
  const auto [H, P, G, N] = shape;
  const int64_t tokens = static_cast<int64_t>(dt.size()) / H;
  Scanned out{std::vector<double>(x.size()), std::vector<double>(x.size()),
              std::vector<double>(ssm_state.begin(), ssm_state.end())};
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t h = 0; h < H; ++h) {
      const int64_t g = h / (H / G);
      const double delta =
          std::clamp(Softplus(double{dt[i * H + h]} + dt_bias[h]), delta_min, delta_max);
      for (int64_t p = 0; p < P; ++p) {
        const int64_t at = (i * H + h) * P + p;
        double y = 0;
        for (int64_t n = 0; n < N; ++n) {
          double& state = out.ssm_state[(h * N + n) * P + p];
          state = std::exp(delta * A[h]) * state + delta * B[(i * G + g) * N + n] * x[at];
          y += C[(i * G + g) * N + n] * state;
        }
        out.y[at] = y;
        out.gated[at] = (y + skip[h] * double{x[at]}) * Silu(z[at]);
      }
    }
  }
  return out;
}

// The project's tolerance for fp32 against float64: 5e-5 * max(0.1, largest magnitude).
inline testing::AssertionResult Close(std::span<const float> actual,
                                      std::span<const double> expected) {
  if (actual.size() != expected.size()) return testing::AssertionFailure() << "sizes differ";
  double largest = 0.1;
  for (const double v : expected) largest = std::max(largest, std::abs(v));
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!(std::abs(actual[i] - expected[i]) <= 5e-5 * largest)) {
      return testing::AssertionFailure()
             << "at " << i << ": " << actual[i] << " for " << expected[i];
    }
  }
  return testing::AssertionSuccess();
}

inline testing::AssertionResult SameBits(std::span<const float> actual,
                                         std::span<const float> expected) {
  if (actual.size() != expected.size()) return testing::AssertionFailure() << "sizes differ";
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::memcmp(&actual[i], &expected[i], sizeof(float)) != 0) {
      return testing::AssertionFailure() << "at " << i << ": " << testing::PrintToString(actual[i])
                                         << " for " << testing::PrintToString(expected[i]);
    }
  }
  return testing::AssertionSuccess();
}

// Runs `test` once on every instruction set of this machine that the kernels were compiled for.
template <typename Test>
void OnEveryTarget(Test test) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    test();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace mambascope::reference
