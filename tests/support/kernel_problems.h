#pragma once

#include <cstdint>
#include <vector>

#include "server/kernels/causal_conv1d.h"
#include "server/kernels/hidden_attention.h"
#include "server/kernels/selective_scan.h"
#include "server/kernels/ssd_scan.h"
#include "tests/support/reference_kernels.h"

// Random inputs of kernels: packed sequences of the given lengths, whose rows stand inside wider
// ones as they do behind in_proj and x_proj. For tests that hold two implementations together.
namespace mambascope::reference {

constexpr int64_t kPadding = 4;

inline std::vector<int32_t> Starts(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> starts = {0};
  for (const int32_t length : lengths) starts.push_back(starts.back() + length);
  return starts;
}

struct ScanProblem {
  std::vector<int32_t> seq_start;
  int64_t tokens, d_inner, d_state;
  int64_t z_stride = d_inner + kPadding, bc_stride = 2 * d_state + kPadding;
  std::vector<float> x, dt, z, A, BC, D;
  std::vector<std::vector<float>> states;  // [sequences][d_state, d_inner]

  ScanProblem(const std::vector<int32_t>& lengths, int64_t d_inner, int64_t d_state, uint32_t seed)
      : seq_start(Starts(lengths)), tokens(seq_start.back()), d_inner(d_inner), d_state(d_state) {
    x = Random(tokens * d_inner, seed);
    dt = Random(tokens * d_inner, seed + 1, -6, 3);
    z = Random(tokens * z_stride, seed + 2, -4, 4);
    A = Random(d_state * d_inner, seed + 3, -16, -0.01f);
    BC = Random(tokens * bc_stride, seed + 4);
    D = Random(d_inner, seed + 5);
    for (size_t s = 0; s < lengths.size(); ++s) {
      states.push_back(Random(d_state * d_inner, seed + 6 + static_cast<uint32_t>(s)));
    }
  }
};

struct ConvProblem {
  std::vector<int32_t> seq_start;
  int64_t tokens, channels, taps, x_stride = channels + kPadding;
  std::vector<float> x_in, weight, bias;
  std::vector<std::vector<float>> states;  // [sequences][taps - 1, channels]

  ConvProblem(const std::vector<int32_t>& lengths, int64_t channels, int64_t taps, uint32_t seed)
      : seq_start(Starts(lengths)), tokens(seq_start.back()), channels(channels), taps(taps) {
    x_in = Random(tokens * x_stride, seed);
    weight = Random(channels * taps, seed + 1);
    bias = Random(channels, seed + 2);
    for (size_t s = 0; s < lengths.size(); ++s) {
      states.push_back(Random((taps - 1) * channels, seed + 3 + static_cast<uint32_t>(s)));
    }
  }
};

struct SsdProblem {
  std::vector<int32_t> seq_start;
  int64_t tokens, heads, head_dim, groups, d_state;
  int64_t channels = heads * head_dim, xbc_stride = channels + 2 * groups * d_state + kPadding;
  int64_t dt_stride = heads + kPadding, z_stride = channels + kPadding;
  float delta_min = 0.01f, delta_max = 1.5f;
  std::vector<float> xBC, dt, dt_bias, A, D, z;
  std::vector<std::vector<float>> states;  // [sequences][heads, d_state, head_dim]

  SsdProblem(const std::vector<int32_t>& lengths, const SsdShape& shape, uint32_t seed)
      : seq_start(Starts(lengths)),
        tokens(seq_start.back()),
        heads(shape.heads),
        head_dim(shape.head_dim),
        groups(shape.groups),
        d_state(shape.d_state) {
    xBC = Random(tokens * xbc_stride, seed);
    dt = Random(tokens * dt_stride, seed + 1, -6, 3);
    dt_bias = Random(heads, seed + 2);
    A = Random(heads, seed + 3, -16, -0.01f);
    D = Random(heads, seed + 4);
    z = Random(tokens * z_stride, seed + 5, -4, 4);
    for (size_t s = 0; s < lengths.size(); ++s) {
      states.push_back(Random(heads * d_state * head_dim, seed + 6 + static_cast<uint32_t>(s)));
    }
  }
};

// One sequence's hidden attention.
struct MapProblem {
  int64_t tokens, d_inner, d_state, bc_stride = 2 * d_state + kPadding;
  std::vector<float> delta, A, BC;

  MapProblem(int64_t tokens, int64_t d_inner, int64_t d_state, uint32_t seed)
      : tokens(tokens), d_inner(d_inner), d_state(d_state) {
    delta = Random(tokens * d_inner, seed, 0, 0.3f);
    A = Random(d_state * d_inner, seed + 1, -8, -0.01f);
    BC = Random(tokens * bc_stride, seed + 2);
  }
  kernels::ScanParameters Parameters() const {
    kernels::ScanParameters scan;
    scan.tokens = tokens;
    scan.d_inner = d_inner;
    scan.d_state = d_state;
    scan.delta = delta.data();
    scan.A = A.data();
    scan.B = BC.data();
    scan.C = BC.data() + d_state;
    scan.bc_stride = bc_stride;
    return scan;
  }
};

inline std::vector<float*> Pointers(std::vector<std::vector<float>>& states) {
  std::vector<float*> pointers;
  for (auto& state : states) pointers.push_back(state.data());
  return pointers;
}

inline std::vector<double> Wide(const std::vector<float>& numbers) {
  return {numbers.begin(), numbers.end()};
}

inline kernels::ScanInputs InputsOf(const ScanProblem& p) {
  kernels::ScanInputs in;
  in.d_inner = p.d_inner;
  in.d_state = p.d_state;
  in.x = p.x.data();
  in.dt = p.dt.data();
  in.z = p.z.data();
  in.z_stride = p.z_stride;
  in.A = p.A.data();
  in.B = p.BC.data();
  in.C = p.BC.data() + p.d_state;
  in.bc_stride = p.bc_stride;
  in.D = p.D.data();
  in.seq_start = p.seq_start;
  return in;
}

inline kernels::ConvInputs InputsOf(const ConvProblem& p, kernels::Activation activation) {
  kernels::ConvInputs in;
  in.x_in = p.x_in.data();
  in.x_stride = p.x_stride;
  in.channels = p.channels;
  in.taps = p.taps;
  in.weight = p.weight.data();
  in.bias = p.bias.data();
  in.activation = activation;
  in.seq_start = p.seq_start;
  return in;
}

inline kernels::SsdInputs InputsOf(const SsdProblem& p) {
  kernels::SsdInputs in;
  in.heads = p.heads;
  in.head_dim = p.head_dim;
  in.groups = p.groups;
  in.d_state = p.d_state;
  in.x = p.xBC.data();
  in.B = p.xBC.data() + p.channels;
  in.C = p.xBC.data() + p.channels + p.groups * p.d_state;
  in.xbc_stride = p.xbc_stride;
  in.dt = p.dt.data();
  in.dt_stride = p.dt_stride;
  in.dt_bias = p.dt_bias.data();
  in.delta_min = p.delta_min;
  in.delta_max = p.delta_max;
  in.A = p.A.data();
  in.D = p.D.data();
  in.z = p.z.data();
  in.z_stride = p.z_stride;
  in.seq_start = p.seq_start;
  return in;
}

}  // namespace mambascope::reference
