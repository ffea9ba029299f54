#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "server/kernels/hidden_attention.h"

// The scans of methods.md section 1 over one sequence from a zero state, and back, in double.
namespace mambascope::reference {

// Everything of a selective scan that may vary. x, delta [tokens, d_inner]; A [d_state, d_inner];
// B, C [tokens, d_state].
struct WideScan {
  int64_t tokens, d_inner, d_state;
  std::vector<double> x, delta, A, B, C;
};

inline WideScan Widen(const kernels::ScanParameters& scan, const std::vector<float>& x) {
  WideScan wide{scan.tokens, scan.d_inner, scan.d_state, {x.begin(), x.end()}, {}, {}, {}, {}};
  wide.delta.assign(scan.delta, scan.delta + scan.tokens * scan.d_inner);
  wide.A.assign(scan.A, scan.A + scan.d_state * scan.d_inner);
  for (int64_t i = 0; i < scan.tokens; ++i) {
    const float *B = scan.B + i * scan.bc_stride, *C = scan.C + i * scan.bc_stride;
    wide.B.insert(wide.B.end(), B, B + scan.d_state);
    wide.C.insert(wide.C.end(), C, C + scan.d_state);
  }
  return wide;
}

// y [tokens, d_inner], without D.
inline std::vector<double> ScanForward(const WideScan& s) {
  std::vector<double> y(s.tokens * s.d_inner), state(s.d_state * s.d_inner);
  for (int64_t i = 0; i < s.tokens; ++i) {
    for (int64_t d = 0; d < s.d_inner; ++d) {
      const double delta = s.delta[i * s.d_inner + d], x = s.x[i * s.d_inner + d];
      for (int64_t n = 0; n < s.d_state; ++n) {
        double& h = state[n * s.d_inner + d];
        h = std::exp(delta * s.A[n * s.d_inner + d]) * h + delta * s.B[i * s.d_state + n] * x;
        y[i * s.d_inner + d] += s.C[i * s.d_state + n] * h;
      }
    }
  }
  return y;
}

struct WideGradients {
  std::vector<double> dx, ddelta, dB, dC;  // of the shapes of what they belong to
};

// The formulas of scan_backward.h.
inline WideGradients ScanBackward(const WideScan& s, const std::vector<double>& dy) {
  const int64_t D = s.d_inner, N = s.d_state;
  WideGradients out{std::vector<double>(s.x.size()), std::vector<double>(s.x.size()),
                    std::vector<double>(s.B.size()), std::vector<double>(s.B.size())};
  for (int64_t d = 0; d < D; ++d) {
    for (int64_t n = 0; n < N; ++n) {
      const auto decay = [&](int64_t i) { return std::exp(s.delta[i * D + d] * s.A[n * D + d]); };
      std::vector<double> state(s.tokens);
      for (int64_t i = 0; i < s.tokens; ++i) {
        state[i] = (i > 0 ? decay(i) * state[i - 1] : 0) +
                   s.delta[i * D + d] * s.B[i * N + n] * s.x[i * D + d];
      }
      double carry = 0;
      for (int64_t i = s.tokens - 1; i >= 0; --i) {
        const int64_t at = i * D + d, row = i * N + n;
        const double g = dy[at] * s.C[row] + carry;
        const double before = i > 0 ? state[i - 1] : 0;
        out.dx[at] += s.delta[at] * s.B[row] * g;
        out.ddelta[at] += g * (s.A[n * D + d] * decay(i) * before + s.B[row] * s.x[at]);
        out.dB[row] += g * s.delta[at] * s.x[at];
        out.dC[row] += dy[at] * state[i];
        carry = decay(i) * g;
      }
    }
  }
  return out;
}

// Everything of a Mamba-2 scan that may vary. x, dy [tokens, heads head_dim]; delta [tokens,
// heads]; B, C [tokens, groups d_state]; A [heads].
struct WideSsd {
  int64_t tokens, heads, head_dim, groups, d_state;
  std::vector<double> x, delta, A, B, C;
};

// One head as a selective scan whose channels are the head's.
inline WideScan HeadOf(const WideSsd& s, int64_t head) {
  const int64_t P = s.head_dim, N = s.d_state, group = head / (s.heads / s.groups);
  WideScan out{s.tokens, P, N, {}, {}, std::vector<double>(N * P, s.A[head]), {}, {}};
  for (int64_t i = 0; i < s.tokens; ++i) {
    const auto x = s.x.begin() + (i * s.heads + head) * P;
    out.x.insert(out.x.end(), x, x + P);
    out.delta.insert(out.delta.end(), P, s.delta[i * s.heads + head]);
    const int64_t row = (i * s.groups + group) * N;
    out.B.insert(out.B.end(), s.B.begin() + row, s.B.begin() + row + N);
    out.C.insert(out.C.end(), s.C.begin() + row, s.C.begin() + row + N);
  }
  return out;
}

// Columns [head P, head P + P) of a matrix [tokens, heads P].
inline std::vector<double> ColumnsOf(const std::vector<double>& all, int64_t tokens, int64_t head,
                                     int64_t P) {
  const int64_t stride = static_cast<int64_t>(all.size()) / tokens;
  std::vector<double> out;
  for (int64_t i = 0; i < tokens; ++i) {
    const auto row = all.begin() + i * stride + head * P;
    out.insert(out.end(), row, row + P);
  }
  return out;
}

// y [tokens, heads head_dim], without D.
inline std::vector<double> SsdForward(const WideSsd& s) {
  std::vector<double> y(s.x.size());
  for (int64_t h = 0; h < s.heads; ++h) {
    const std::vector<double> of_head = ScanForward(HeadOf(s, h));
    for (size_t k = 0; k < of_head.size(); ++k) {
      const int64_t i = static_cast<int64_t>(k) / s.head_dim,
                    p = static_cast<int64_t>(k) % s.head_dim;
      y[(i * s.heads + h) * s.head_dim + p] = of_head[k];
    }
  }
  return y;
}

// The formulas of ssd_backward.h: a head's gradients are a selective scan's, summed over what its
// channels, and the heads of a group, share.
inline WideGradients SsdBackward(const WideSsd& s, const std::vector<double>& dy) {
  const int64_t P = s.head_dim, N = s.d_state, heads_of_group = s.heads / s.groups;
  WideGradients out{std::vector<double>(s.x.size()), std::vector<double>(s.delta.size()),
                    std::vector<double>(s.B.size()), std::vector<double>(s.B.size())};
  for (int64_t h = 0; h < s.heads; ++h) {
    const WideGradients head = ScanBackward(HeadOf(s, h), ColumnsOf(dy, s.tokens, h, P));
    for (int64_t i = 0; i < s.tokens; ++i) {
      for (int64_t p = 0; p < P; ++p) {
        out.dx[(i * s.heads + h) * P + p] = head.dx[i * P + p];
        out.ddelta[i * s.heads + h] += head.ddelta[i * P + p];
      }
      for (int64_t n = 0; n < N; ++n) {
        const int64_t row = (i * s.groups + h / heads_of_group) * N + n;
        out.dB[row] += head.dB[i * N + n];
        out.dC[row] += head.dC[i * N + n];
      }
    }
  }
  return out;
}

}  // namespace mambascope::reference
