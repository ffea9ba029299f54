// The two parts of a Mamba-1 mixer that torch has no fast CPU operation for: the causal depthwise
// convolution with SiLU, and the gated selective scan, each forward and backward.
//
// Layouts, all float32: tokens [batch, length, channels] with the channels innermost, so that every
// inner loop runs over channels and the compiler vectorises it; parameters are transposed to
// [taps, channels] and [states, channels] by the caller for the same reason.  `stride` is the
// distance between two tokens of an input that is one half of a wider row (x_in and z).
//
// No [length, channels, states] tensor outlives a sequence: the backward pass runs the scan of one
// sequence again and keeps its states in a scratch buffer that fits the second-level cache.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// exp by Cody-Waite reduction and a degree-6 polynomial, about 2e-7 relative error.  Written out
// because a call to expf would stop the vectoriser.  Adding 1.5 * 2^23 rounds to an integer.
inline float exp_fast(float v) {
  v = v < -87.0f ? -87.0f : v;
  v = v > 88.0f ? 88.0f : v;
  const float shifted = v * 1.44269504088896341f + 12582912.0f;
  const float whole = shifted - 12582912.0f;
  const float r = (v - whole * 0.693359375f) - whole * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

inline float sigmoid(float v) { return 1.0f / (1.0f + exp_fast(-v)); }

// d/dv of v * sigmoid(v), given s = sigmoid(v).
inline float silu_slope(float v, float s) { return s * (1.0f + v * (1.0f - s)); }

// c = bias + sum over taps that reach back to no position before 0; the last tap is the current
// token.
void convolve_row(const float* x, long stride, const float* weight, const float* bias,
                  long position, long channels, long taps, float* __restrict c) {
  for (long d = 0; d < channels; ++d) c[d] = bias[d];
  for (long back = 0; back < taps && back <= position; ++back) {
    const float* __restrict row = x + (position - back) * stride;
    const float* __restrict tap = weight + (taps - 1 - back) * channels;
    for (long d = 0; d < channels; ++d) c[d] += tap[d] * row[d];
  }
}

// One sequence of the scan, as pointers to its first token.
struct Sequence {
  const float *x, *delta, *b, *c, *z;
  long z_stride;
};

struct Sizes {
  long length, channels, states;
};

// One step of the scan: decay = exp(delta A), state = decay * previous + delta x B, y = sum_n C
// state. `previous` may be null (before the first token) and may equal `state`.
void scan_step(const Sequence& s, const Sizes& n, const float* a, long position,
               const float* previous, float* decay, float* state, float* __restrict y) {
  const float* __restrict x = s.x + position * n.channels;
  const float* __restrict delta = s.delta + position * n.channels;
  for (long d = 0; d < n.channels; ++d) y[d] = 0.0f;
  for (long k = 0; k < n.states; ++k) {
    const float b = s.b[position * n.states + k], c = s.c[position * n.states + k];
    const float* __restrict rate = a + k * n.channels;
    float* __restrict decay_row = decay + k * n.channels;
    float* row = state + k * n.channels;
    const float* before = previous ? previous + k * n.channels : nullptr;
    for (long d = 0; d < n.channels; ++d) decay_row[d] = exp_fast(delta[d] * rate[d]);
    if (before) {
#pragma GCC ivdep
      for (long d = 0; d < n.channels; ++d) row[d] = decay_row[d] * before[d] + delta[d] * x[d] * b;
    } else {
      for (long d = 0; d < n.channels; ++d) row[d] = delta[d] * x[d] * b;
    }
#pragma GCC ivdep
    for (long d = 0; d < n.channels; ++d) y[d] += c * row[d];
  }
}

// Gradients of one sequence's inputs, written, and of the shared parameters, added to.
struct SequenceGradients {
  float *x, *delta, *b, *c, *z;  // one token each per row
  float *a, *skip;               // [states, channels], [channels]
};

// What the backward pass keeps of one sequence.
struct Scratch {
  std::vector<float> states, decays, y, carry;
  Scratch(const Sizes& n)
      : states(n.length * n.states * n.channels),
        decays(n.length * n.states * n.channels),
        y(n.length * n.channels),
        carry(n.states * n.channels) {}
};

// One state row k of one backward step.  carry = gradient of the loss in state k after this token.
void backward_state(const Sequence& s, const SequenceGradients& g, const Sizes& n, const float* a,
                    Scratch& scratch, const float* __restrict grad_y, long position, long k) {
  const float b = s.b[position * n.states + k], c = s.c[position * n.states + k];
  const long here = (position * n.states + k) * n.channels;
  const float* __restrict rate = a + k * n.channels;
  const float* __restrict x = s.x + position * n.channels;
  const float* __restrict delta = s.delta + position * n.channels;
  const float* __restrict state = scratch.states.data() + here;
  const float* __restrict decay = scratch.decays.data() + here;
  float* __restrict carry = scratch.carry.data() + k * n.channels;
  float* __restrict grad_x = g.x + position * n.channels;
  float* __restrict grad_delta = g.delta + position * n.channels;
  float* __restrict grad_rate = g.a + k * n.channels;
  float grad_b = 0.0f, grad_c = 0.0f;
#pragma omp simd reduction(+ : grad_b, grad_c)
  for (long d = 0; d < n.channels; ++d) {
    const float flow = carry[d] + c * grad_y[d];
    carry[d] = flow;
    grad_c += grad_y[d] * state[d];
    grad_b += flow * delta[d] * x[d];
    grad_x[d] += flow * delta[d] * b;
    grad_delta[d] += flow * x[d] * b;
  }
  g.b[position * n.states + k] = grad_b;
  g.c[position * n.states + k] = grad_c;
  if (position == 0) return;
  const float* __restrict before = state - n.states * n.channels;
#pragma omp simd
  for (long d = 0; d < n.channels; ++d) {
    const float through_decay = carry[d] * before[d] * decay[d];
    grad_delta[d] += through_decay * rate[d];
    grad_rate[d] += through_decay * delta[d];
    carry[d] *= decay[d];
  }
}

void backward_sequence(const Sequence& s, const SequenceGradients& g, const Sizes& n,
                       const float* a, const float* skip, const float* grad_out, Scratch& scratch) {
  const long plane = n.states * n.channels;
  for (long i = 0; i < n.length; ++i)
    scan_step(s, n, a, i, i ? scratch.states.data() + (i - 1) * plane : nullptr,
              scratch.decays.data() + i * plane, scratch.states.data() + i * plane,
              scratch.y.data() + i * n.channels);
  std::vector<float> grad_y(n.channels);
  for (float& v : scratch.carry) v = 0.0f;
  for (long i = n.length - 1; i >= 0; --i) {
    const float* __restrict x = s.x + i * n.channels;
    const float* __restrict z = s.z + i * s.z_stride;
    const float* __restrict y = scratch.y.data() + i * n.channels;
    const float* __restrict out = grad_out + i * n.channels;
    float* __restrict gate_grad = g.z + i * n.channels;
    float* __restrict grad_x = g.x + i * n.channels;
    float* __restrict grad_delta = g.delta + i * n.channels;
    float* __restrict gy = grad_y.data();
    for (long d = 0; d < n.channels; ++d) {
      const float open = sigmoid(z[d]);
      gate_grad[d] = out[d] * (y[d] + skip[d] * x[d]) * silu_slope(z[d], open);
      gy[d] = out[d] * z[d] * open;
      g.skip[d] += gy[d] * x[d];
      grad_x[d] = gy[d] * skip[d];
      grad_delta[d] = 0.0f;
    }
    for (long k = 0; k < n.states; ++k) backward_state(s, g, n, a, scratch, gy, i, k);
  }
}

Sequence sequence_at(long index, const Sizes& n, const float* x, const float* delta, const float* b,
                     const float* c, const float* z, long z_stride) {
  const long rows = index * n.length;
  return {x + rows * n.channels, delta + rows * n.channels, b + rows * n.states,
          c + rows * n.states,   z + rows * z_stride,       z_stride};
}

}  // namespace

extern "C" {

// out = silu(conv(x)).  x [batch, length, channels] with `stride` floats between tokens; weight
// [taps, channels]; bias [channels].
void conv_forward(const float* x, long stride, const float* weight, const float* bias, float* out,
                  long batch, long length, long channels, long taps) {
  for (long s = 0; s < batch; ++s)
    for (long i = 0; i < length; ++i) {
      float* __restrict row = out + (s * length + i) * channels;
      convolve_row(x + s * length * stride, stride, weight, bias, i, channels, taps, row);
      for (long d = 0; d < channels; ++d) row[d] *= sigmoid(row[d]);
    }
}

// grad_x [batch, length, channels] contiguous; grad_weight and grad_bias; all three zero on entry.
void conv_backward(const float* x, long stride, const float* weight, const float* bias,
                   const float* grad_out, float* grad_x, float* grad_weight, float* grad_bias,
                   long batch, long length, long channels, long taps) {
  std::vector<float> buffer(channels);
  float* __restrict grad_c = buffer.data();
  for (long s = 0; s < batch; ++s)
    for (long i = 0; i < length; ++i) {
      const float* sequence = x + s * length * stride;
      const float* __restrict out = grad_out + (s * length + i) * channels;
      convolve_row(sequence, stride, weight, bias, i, channels, taps, grad_c);
      for (long d = 0; d < channels; ++d) {
        grad_c[d] = out[d] * silu_slope(grad_c[d], sigmoid(grad_c[d]));
        grad_bias[d] += grad_c[d];
      }
      for (long back = 0; back < taps && back <= i; ++back) {
        const float* __restrict row = sequence + (i - back) * stride;
        const float* __restrict tap = weight + (taps - 1 - back) * channels;
        float* __restrict into = grad_x + (s * length + i - back) * channels;
        float* __restrict into_tap = grad_weight + (taps - 1 - back) * channels;
        for (long d = 0; d < channels; ++d) {
          into[d] += tap[d] * grad_c[d];
          into_tap[d] += row[d] * grad_c[d];
        }
      }
    }
}

// out = (scan(x) + skip * x) * silu(z).  a [states, channels] is negative; b and c [batch, length,
// states].
void scan_forward(const float* x, const float* delta, const float* a, const float* b,
                  const float* c, const float* skip, const float* z, long z_stride, float* out,
                  long batch, long length, long channels, long states) {
  const Sizes n{length, channels, states};
  std::vector<float> state(states * channels), decay(states * channels);
  for (long index = 0; index < batch; ++index) {
    const Sequence s = sequence_at(index, n, x, delta, b, c, z, z_stride);
    for (long i = 0; i < length; ++i) {
      float* __restrict y = out + (index * length + i) * channels;
      scan_step(s, n, a, i, i ? state.data() : nullptr, decay.data(), state.data(), y);
      const float* __restrict row = s.x + i * channels;
      const float* __restrict gate = s.z + i * z_stride;
      for (long d = 0; d < channels; ++d)
        y[d] = (y[d] + skip[d] * row[d]) * gate[d] * sigmoid(gate[d]);
    }
  }
}

// grad_a and grad_skip are zero on entry; the others are overwritten.
void scan_backward(const float* x, const float* delta, const float* a, const float* b,
                   const float* c, const float* skip, const float* z, long z_stride,
                   const float* grad_out, float* grad_x, float* grad_delta, float* grad_a,
                   float* grad_b, float* grad_c, float* grad_skip, float* grad_z, long batch,
                   long length, long channels, long states) {
  const Sizes n{length, channels, states};
  Scratch scratch(n);
  for (long index = 0; index < batch; ++index) {
    const long rows = index * length;
    const Sequence s = sequence_at(index, n, x, delta, b, c, z, z_stride);
    const SequenceGradients g{grad_x + rows * channels,
                              grad_delta + rows * channels,
                              grad_b + rows * states,
                              grad_c + rows * states,
                              grad_z + rows * channels,
                              grad_a,
                              grad_skip};
    backward_sequence(s, g, n, a, skip, grad_out + rows * channels, scratch);
  }
}

}  // extern "C"
