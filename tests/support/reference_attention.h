#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "server/kernels/hidden_attention.h"

namespace mambascope::reference {

// A scan with random parameters and the buffers behind it. B and C stand in one array with other
// numbers around them, as x_proj leaves them; those are NaN here, because nobody may read them.
struct RandomScan {
  std::vector<float> delta, A, bc;
  kernels::ScanParameters parameters;

  RandomScan(int64_t tokens, int64_t d_inner, int64_t d_state, uint32_t seed, float slowest = 1e-3f,
             float fastest = 0.5f) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    // Steps over several orders of magnitude, A as Mamba initialises it and a little beyond.
    for (int64_t i = 0; i < tokens * d_inner; ++i) {
      delta.push_back(slowest * std::pow(fastest / slowest, uniform(random)));
    }
    for (int64_t n = 0; n < d_state; ++n) {
      for (int64_t d = 0; d < d_inner; ++d) {
        A.push_back(-static_cast<float>(n % 16 + 1) * (0.5f + uniform(random)));
      }
    }
    const int64_t stride = 2 * d_state + 5;
    bc.assign(tokens * stride, std::nanf(""));
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t n = 0; n < d_state; ++n) {
        bc[i * stride + 1 + n] = normal(random);
        bc[i * stride + 3 + d_state + n] = normal(random);
      }
    }
    parameters = {.tokens = tokens,
                  .d_inner = d_inner,
                  .d_state = d_state,
                  .delta = delta.data(),
                  .A = A.data(),
                  .B = bc.data() + 1,
                  .C = bc.data() + 3 + d_state,
                  .bc_stride = stride};
  }
  RandomScan(const RandomScan&) = delete;
};

// The definitions of hidden_attention.h, spelled out in double.
class ReferenceAttention {
 public:
  explicit ReferenceAttention(const kernels::ScanParameters& scan) : scan_(scan) {}

  double Decay(int64_t n, int64_t d, int64_t i, int64_t j) const {
    if (j > i) return 0;
    double exponent = 0;
    for (int64_t k = j + 1; k <= i; ++k) {
      exponent += double{scan_.delta[k * scan_.d_inner + d]} * scan_.A[n * scan_.d_inner + d];
    }
    return std::exp(exponent);
  }
  double Q(int64_t n, int64_t i) const { return scan_.C[i * scan_.bc_stride + n]; }
  double K(int64_t n, int64_t d, int64_t j) const {
    return double{scan_.delta[j * scan_.d_inner + d]} * scan_.B[j * scan_.bc_stride + n];
  }
  double OfState(int64_t n, int64_t d, int64_t i, int64_t j) const {
    return Q(n, i) * Decay(n, d, i, j) * K(n, d, j);
  }

  std::vector<double> Decays(int64_t n, int64_t d) const {
    return Map([&](int64_t i, int64_t j) { return Decay(n, d, i, j); });
  }
  std::vector<double> StateMap(int64_t n, int64_t d) const {
    return Map([&](int64_t i, int64_t j) { return OfState(n, d, i, j); });
  }
  std::vector<double> ChannelMap(int64_t d) const {
    std::vector<double> alpha(scan_.tokens * scan_.tokens);
    for (int64_t n = 0; n < scan_.d_state; ++n) {
      for (int64_t j = 0; j < scan_.tokens; ++j) {
        double exponent = 0;
        for (int64_t i = j; i < scan_.tokens; ++i) {
          if (i > j) {
            exponent += double{scan_.delta[i * scan_.d_inner + d]} * scan_.A[n * scan_.d_inner + d];
          }
          alpha[i * scan_.tokens + j] += Q(n, i) * std::exp(exponent) * K(n, d, j);
        }
      }
    }
    return alpha;
  }
  std::vector<double> Mean(const std::vector<int32_t>& channels, bool absolute = false) const {
    std::vector<double> mean(scan_.tokens * scan_.tokens);
    for (const int32_t d : channels) {
      const std::vector<double> alpha = ChannelMap(d);
      for (size_t i = 0; i < mean.size(); ++i) {
        mean[i] +=
            (absolute ? std::fabs(alpha[i]) : alpha[i]) / static_cast<double>(channels.size());
      }
    }
    return mean;
  }
  std::vector<int32_t> AllChannels() const {
    std::vector<int32_t> all;
    for (int32_t d = 0; d < scan_.d_inner; ++d) all.push_back(d);
    return all;
  }

 private:
  template <class Entry>
  std::vector<double> Map(const Entry& entry) const {
    std::vector<double> map(scan_.tokens * scan_.tokens);
    for (int64_t i = 0; i < scan_.tokens; ++i) {
      for (int64_t j = 0; j <= i; ++j) map[i * scan_.tokens + j] = entry(i, j);
    }
    return map;
  }

  kernels::ScanParameters scan_;
};

}  // namespace mambascope::reference
