#include "tests/support/scalar_kernels.h"

#include <algorithm>
#include <vector>

#include "server/kernels/scan_body.h"
#include "server/kernels/sum_body.h"

namespace mambascope::kernels::scalar {
namespace {

// Sums over states as kLanes lanes do: each lane a chain in the order of its states, then a tree.
// term(n, sum) returns sum with state n's term added.
template <typename Term>
float SumOverStates(int64_t d_state, const Term& term) {
  const int per_lane = body::StatesPerLane(d_state);
  float lanes[body::kLanes];
  for (int lane = 0; lane < body::kLanes; ++lane) {
    lanes[lane] = 0;
    for (int s = 0; s < per_lane; ++s) {
      const int n = body::StateOf(lane, s, per_lane, body::kLanes);
      if (n < d_state) lanes[lane] = term(n, lanes[lane]);
    }
  }
  return body::TreeSum(lanes, body::kLanes);
}

// The sum of `cols` terms as RowLanes(cols) lanes add it.
template <typename Term>
float SumOverRow(int64_t cols, const Term& term) {
  const int lanes = body::RowLanes(cols);
  std::vector<float> sums(lanes, 0.0f);
  for (int64_t m = 0; m < cols; ++m) {
    float& sum = sums[m / body::kPacket % lanes];
    sum = term(m, sum);
  }
  return body::TreeSum(sums.data(), lanes);
}

}  // namespace

void CausalConv1d(const ConvInputs& in, const ConvOutputs& out) {
  const int64_t before = in.taps - 1;
  for (size_t s = 0; s + 1 < in.seq_start.size(); ++s) {
    const int64_t begin = in.seq_start[s], tokens = in.seq_start[s + 1] - begin;
    float* state = out.conv_state[s];
    for (int64_t d = 0; d < in.channels; ++d) {
      const auto input = [&](int64_t i) {  // token i of the sequence, from -before on
        return i < 0 ? state[(before + i) * in.channels + d]
                     : in.x_in[(begin + i) * in.x_stride + d];
      };
      for (int64_t i = 0; i < tokens; ++i) {
        float c = in.bias == nullptr ? 0.0f : in.bias[d];
        for (int64_t k = 0; k < in.taps; ++k) {
          c = body::Tap(in.weight[d * in.taps + k], input(i - before + k), c);
        }
        out.x[(begin + i) * in.channels + d] = body::Activate(in.activation, c);
      }
      for (int64_t k = 0; k < before; ++k) {  // oldest first: never overwrites what is still read
        state[k * in.channels + d] = input(tokens - before + k);
      }
    }
  }
}

void SelectiveScan(const ScanInputs& in, const ScanOutputs& out) {
  for (size_t s = 0; s + 1 < in.seq_start.size(); ++s) {
    for (int64_t i = in.seq_start[s]; i < in.seq_start[s + 1]; ++i) {
      const float* B = in.B + i * in.bc_stride;
      const float* C = in.C + i * in.bc_stride;
      for (int64_t d = 0; d < in.d_inner; ++d) {
        const int64_t at = i * in.d_inner + d;
        const float delta = body::Softplus(in.dt[at]);
        const float y = SumOverStates(in.d_state, [&](int n, float sum) {
          float& h = out.ssm_state[s][n * in.d_inner + d];
          const float A = in.A[n * in.d_inner + d] * body::kLog2E;
          h = body::Advance(body::Discretize(delta, A, B[n], in.x[at]), h);
          return fmaf(C[n], h, sum);
        });
        if (out.y != nullptr) out.y[at] = y;
        out.gated[at] = body::Gate(y, in.D[d], in.x[at], in.z[i * in.z_stride + d]);
      }
    }
  }
}

void SsdScan(const SsdInputs& in, const SsdOutputs& out) {
  const int64_t channels = in.heads * in.head_dim;
  for (size_t s = 0; s + 1 < in.seq_start.size(); ++s) {
    for (int64_t i = in.seq_start[s]; i < in.seq_start[s + 1]; ++i) {
      for (int64_t head = 0; head < in.heads; ++head) {
        const int64_t group = head / (in.heads / in.groups);
        const float* B = in.B + i * in.xbc_stride + group * in.d_state;
        const float* C = in.C + i * in.xbc_stride + group * in.d_state;
        const float delta = body::ClampedDelta(in.dt[i * in.dt_stride + head], in.dt_bias[head],
                                               in.delta_min, in.delta_max);
        const float decay = body::DecayPower(delta * (in.A[head] * body::kLog2E));
        for (int64_t p = 0; p < in.head_dim; ++p) {
          const int64_t d = head * in.head_dim + p;
          const float x = in.x[i * in.xbc_stride + d];
          const float y = SumOverStates(in.d_state, [&](int n, float sum) {
            float& h = out.ssm_state[s][(head * in.d_state + n) * in.head_dim + p];
            h = body::Advance({decay, delta * x * B[n]}, h);
            return fmaf(C[n], h, sum);
          });
          if (out.y != nullptr) out.y[i * channels + d] = y;
          out.gated[i * channels + d] = body::Gate(y, in.D[head], x, in.z[i * in.z_stride + d]);
        }
      }
    }
  }
}

void RmsNorm(const float* h, const float* weight, float eps, int64_t rows, int64_t cols,
             int64_t groups, int64_t stride, float* u) {
  const int64_t width = cols / groups;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t g = 0; g < groups; ++g) {
      const float* from = h + i * stride + g * width;
      float* to = u + i * stride + g * width;
      const float squares =
          SumOverRow(width, [&](int64_t m, float sum) { return fmaf(from[m], from[m], sum); });
      const float scale = body::RmsScale(squares, static_cast<float>(width), eps);
      for (int64_t m = 0; m < width; ++m) {
        to[m] = weight == nullptr ? from[m] * scale : weight[g * width + m] * (from[m] * scale);
      }
    }
  }
}

void AdjointScan(const ScanParameters& scan, const float* v, int64_t v_stride, bool v_per_channel,
                 float* rows) {
  std::vector<float> state(scan.d_inner * scan.d_state, 0.0f);
  for (int64_t j = scan.tokens - 1; j >= 0; --j) {
    const float* B = scan.B + j * scan.bc_stride;
    const float* C = scan.C + j * scan.bc_stride;
    for (int64_t d = 0; d < scan.d_inner; ++d) {
      const float delta = scan.delta[j * scan.d_inner + d];
      const float v_j = v[j * v_stride + (v_per_channel ? d : 0)];
      const float sum = SumOverStates(scan.d_state, [&](int n, float total) {
        float& state_n = state[n * scan.d_inner + d];
        const float g = body::EnterAdjoint(v_j, C[n], state_n);
        state_n = g * body::DecayPower(delta * (scan.A[n * scan.d_inner + d] * body::kLog2E));
        return fmaf(B[n], g, total);
      });
      rows[j * scan.d_inner + d] = delta * sum;
    }
  }
}

void ForwardScan(const ScanParameters& scan, const float* v, float* rows) {
  std::vector<float> state(scan.d_inner * scan.d_state, 0.0f);
  for (int64_t i = 0; i < scan.tokens; ++i) {
    const float* B = scan.B + i * scan.bc_stride;
    const float* C = scan.C + i * scan.bc_stride;
    for (int64_t d = 0; d < scan.d_inner; ++d) {
      const float delta = scan.delta[i * scan.d_inner + d];
      rows[i * scan.d_inner + d] = SumOverStates(scan.d_state, [&](int n, float sum) {
        float& h = state[n * scan.d_inner + d];
        const float A = scan.A[n * scan.d_inner + d] * body::kLog2E;
        h = body::Advance(body::Discretize(delta, A, B[n], v[i]), h);
        return fmaf(C[n], h, sum);
      });
    }
  }
}

void RowMeans(const float* rows, int64_t count, int64_t cols, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float* row = rows + i * cols;
    out[i] = SumOverRow(cols, [&](int64_t m, float sum) { return sum + row[m]; }) /
             static_cast<float>(cols);
  }
}

}  // namespace mambascope::kernels::scalar
