#include "server/kernels/ssd_scan.h"

#include <algorithm>

#include "server/base/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/ssd_scan.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/lane_rows-inl.h"

// Channels of one head that a task takes at a time: the same on every target.
#ifndef MAMBASCOPE_KERNELS_SSD_SCAN_UNIT_
#define MAMBASCOPE_KERNELS_SSD_SCAN_UNIT_
namespace mambascope::kernels {
constexpr int64_t kUnit = 64;
inline int64_t UnitsOfHead(int64_t head_dim) { return (head_dim + kUnit - 1) / kUnit; }
}  // namespace mambascope::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// Tokens for which a block of states stays in registers. Their inputs, y and the block's B and C
// stay in the first-level cache.
constexpr int64_t kChunkTokens = 32;
constexpr int64_t kMaxStates = 256;
// A block of states is kBlock rows of kVecs registers; with 16 registers of two each remain for y,
// inputs, B and C.
constexpr int64_t kBlock = 4;
constexpr int kVecs = hn::MaxLanes(F32()) >= 16 ? 4 : 2;

struct Scratch {
  HWY_ALIGN float delta[kChunkTokens];  // of one head; kChunkTokens is a multiple of any register
  HWY_ALIGN float decay[kChunkTokens];
  HWY_ALIGN float drive[kChunkTokens][kUnit];  // delta x
  HWY_ALIGN float y[kChunkTokens][kUnit];
  // Of one group, block of states after block: a row of B and C lies kilobytes from the next, and
  // rows that far apart share few sets of the first-level cache.
  HWY_ALIGN float bc[kMaxStates / kBlock][kChunkTokens][2 * kBlock];
};

// The rows of the next unit, 256 bytes of each, which no hardware prefetcher follows.
struct NextUnit {
  const float *x, *z;
  float* gated;
  int64_t x_stride, z_stride, stride;
  HWY_INLINE void Prefetch(int64_t token) const {
    for (int64_t c = 0; c < kUnit; c += 16) {
      __builtin_prefetch(x + token * x_stride + c, /*write=*/0, /*second level*/ 2);
      __builtin_prefetch(z + token * z_stride + c, 0, 2);
      __builtin_prefetch(gated + token * stride + c, /*write=*/1, 2);
    }
  }
};

HWY_INLINE Vec Delta(F32 d, Vec dt, Vec bias, const SsdInputs& in) {
  const Vec delta = Softplus(d, hn::Add(dt, bias));  // in this order x86 hands a NaN in it on
  return hn::Min(hn::Set(d, in.delta_max), hn::Max(hn::Set(d, in.delta_min), delta));
}

// B and C of `tokens` tokens of one group.
void PackGroup(const SsdInputs& in, int64_t group, int64_t begin, int64_t tokens, Scratch& s) {
  const float* B = in.B + begin * in.xbc_stride + group * in.d_state;
  const float* C = in.C + begin * in.xbc_stride + group * in.d_state;
  for (int64_t i = 0; i < tokens; ++i, B += in.xbc_stride, C += in.xbc_stride) {
    for (int64_t n = 0; n < in.d_state; n += kBlock) {
      float* to = s.bc[n / kBlock][i];
      const int64_t count = std::min(kBlock, in.d_state - n);
      std::copy_n(B + n, count, to);
      std::copy_n(C + n, count, to + kBlock);
    }
  }
}

// delta and decay of one head, for all tokens of the chunk.
void DecayHead(const SsdInputs& in, int64_t head, int64_t begin, int64_t tokens, Scratch& s) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < tokens; ++i) s.delta[i] = in.dt[(begin + i) * in.dt_stride + head];
  for (int64_t i = tokens; i % lanes != 0; ++i) s.delta[i] = 0;
  const Vec bias = hn::Set(d, in.dt_bias[head]), A = hn::Set(d, in.A[head] * 1.44269504f);
  for (int64_t i = 0; i < tokens; i += lanes) {
    const Vec delta = Delta(d, hn::Load(d, s.delta + i), bias, in);
    hn::Store(delta, d, s.delta + i);
    hn::Store(Exp2NonPositive(d, hn::Mul(delta, A)), d, s.decay + i);
  }
}

// kRows states of kRegisters registers of channels over all tokens of the chunk. `state` is the
// first row, rows of `stride`, the first `count` channels in use; bc is the first state's B of the
// first token. The sum over states is one chain in their order, whatever the blocks.
template <int kRegisters, int kRows>
void Recur(int64_t tokens, const float* bc, int64_t lane, int64_t count, int64_t stride,
           float* state, Scratch& s) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec h[kRows][kRegisters];
  for (int n = 0; n < kRows; ++n) {
    for (int v = 0; v < kRegisters; ++v) {
      h[n][v] = LoadLanes(d, state + n * stride + v * lanes, count - v * lanes);
    }
  }
  for (int64_t i = 0; i < tokens; ++i, bc += 2 * kBlock) {
    const Vec decay = hn::Set(d, s.decay[i]);
    Vec drive[kRegisters], y[kRegisters];
    for (int v = 0; v < kRegisters; ++v) {
      drive[v] = hn::Load(d, s.drive[i] + lane + v * lanes);
      y[v] = hn::Load(d, s.y[i] + lane + v * lanes);
    }
    for (int n = 0; n < kRows; ++n) {
      const Vec B = hn::Set(d, bc[n]), C = hn::Set(d, bc[kBlock + n]);
      for (int v = 0; v < kRegisters; ++v) {
        h[n][v] = hn::MulAdd(decay, h[n][v], hn::Mul(drive[v], B));
        y[v] = hn::MulAdd(h[n][v], C, y[v]);
      }
    }
    for (int v = 0; v < kRegisters; ++v) hn::Store(y[v], d, s.y[i] + lane + v * lanes);
  }
  for (int n = 0; n < kRows; ++n) {
    for (int v = 0; v < kRegisters; ++v) {
      StoreLanes(h[n][v], d, state + n * stride + v * lanes, count - v * lanes);
    }
  }
}

// All states of kRegisters registers of channels.
template <int kRegisters>
void RecurStates(const SsdInputs& in, int64_t tokens, int64_t lane, int64_t count, float* state,
                 const NextUnit& next, Scratch& s) {
  int64_t n = 0, fetched = 0;
  for (; n + kBlock <= in.d_state; n += kBlock) {
    for (; fetched * in.d_state < n * tokens; ++fetched) next.Prefetch(fetched);
    Recur<kRegisters, kBlock>(tokens, s.bc[n / kBlock][0], lane, count, in.head_dim,
                              state + n * in.head_dim, s);
  }
  for (; n < in.d_state; ++n) {
    Recur<kRegisters, 1>(tokens, s.bc[n / kBlock][0] + n % kBlock, lane, count, in.head_dim,
                         state + n * in.head_dim, s);
  }
}

// `count` channels of one head, from channel `first` of all heads on, over the chunk's tokens.
void ScanUnit(const SsdInputs& in, const SsdOutputs& out, int64_t head, int64_t first,
              int64_t count, int64_t begin, int64_t tokens, float* state, const NextUnit& next,
              Scratch& s) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), channels = in.heads * in.head_dim;
  for (int64_t i = 0; i < tokens; ++i) {
    const float* x = in.x + (begin + i) * in.xbc_stride + first;
    const Vec delta = hn::Set(d, s.delta[i]);
    for (int64_t c = 0; c < count; c += lanes) {
      hn::Store(hn::Mul(delta, LoadLanes(d, x + c, count - c)), d, s.drive[i] + c);
      hn::Store(hn::Zero(d), d, s.y[i] + c);
    }
  }
  for (int64_t c = 0; c < count;) {
    const int64_t registers = (count - c + lanes - 1) / lanes;
    if (registers >= kVecs) {
      RecurStates<kVecs>(in, tokens, c, count - c, state + c, next, s);
      c += kVecs * lanes;
    } else if (registers >= 2) {
      RecurStates<2>(in, tokens, c, count - c, state + c, next, s);
      c += 2 * lanes;
    } else {
      RecurStates<1>(in, tokens, c, count - c, state + c, next, s);
      c += lanes;
    }
  }
  const Vec skip = hn::Set(d, in.D[head]);
  for (int64_t i = 0; i < tokens; ++i) {
    const float* x = in.x + (begin + i) * in.xbc_stride + first;
    const float* z = in.z + (begin + i) * in.z_stride + first;
    const int64_t at = (begin + i) * channels + first;
    for (int64_t c = 0; c < count; c += lanes) {
      const int64_t left = count - c;
      const Vec y = hn::Load(d, s.y[i] + c);
      if (out.y != nullptr) StoreLanes(y, d, out.y + at + c, left);
      const Vec skipped = hn::MulAdd(skip, LoadLanes(d, x + c, left), y);
      const Vec gate = Silu(d, LoadLanes(d, z + c, left));
      StoreLanes(hn::Mul(skipped, gate), d, out.gated + at + c, left);
    }
  }
}

// Units [first, last): kUnit channels of a head each, head after head.
void ScanUnits(const SsdInputs& in, const SsdOutputs& out, int64_t first, int64_t last) {
  const int64_t units = UnitsOfHead(in.head_dim), channels = in.heads * in.head_dim;
  const int64_t heads_of_group = in.heads / in.groups;
  const auto first_channel = [&](int64_t unit) {
    return unit / units * in.head_dim + unit % units * kUnit;
  };
  Scratch scratch;
  for (size_t sequence = 0; sequence + 1 < in.seq_start.size(); ++sequence) {
    const int64_t end = in.seq_start[sequence + 1];
    for (int64_t begin = in.seq_start[sequence]; begin < end; begin += kChunkTokens) {
      const int64_t tokens = std::min(kChunkTokens, end - begin);
      int64_t packed = -1, decayed = -1;  // the group and the head that the scratch holds
      for (int64_t unit = first; unit < last; ++unit) {
        const int64_t head = unit / units, channel = first_channel(unit);
        if (packed != head / heads_of_group) {
          packed = head / heads_of_group;
          PackGroup(in, packed, begin, tokens, scratch);
        }
        if (decayed != head) DecayHead(in, decayed = head, begin, tokens, scratch);
        const int64_t after = first_channel(std::min(unit + 1, last - 1));
        const NextUnit next{in.x + begin * in.xbc_stride + after,
                            in.z + begin * in.z_stride + after,
                            out.gated + begin * channels + after,
                            in.xbc_stride,
                            in.z_stride,
                            channels};
        const int64_t in_head = channel - head * in.head_dim;
        ScanUnit(in, out, head, channel, std::min(kUnit, in.head_dim - in_head), begin, tokens,
                 out.ssm_state[sequence] + head * in.d_state * in.head_dim + in_head, next,
                 scratch);
      }
    }
  }
}

// One row of delta.
void DeltaRow(const SsdInputs& in, int64_t token, float* delta) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const float* dt = in.dt + token * in.dt_stride;
  for (int64_t h = 0; h < in.heads; h += lanes) {
    const int64_t left = in.heads - h;
    const Vec bias = LoadLanes(d, in.dt_bias + h, left);
    StoreLanes(Delta(d, LoadLanes(d, dt + h, left), bias, in), d, delta + h, left);
  }
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(ScanUnits);
HWY_EXPORT(DeltaRow);

// Below this many updates of a state, waking another thread costs more than the work.
constexpr int64_t kWorthSplitting = 65536;

}  // namespace

void SsdScan(ThreadPool& pool, const SsdInputs& in, const SsdOutputs& out) {
  const int64_t channels = in.heads * in.head_dim;
  MS_CHECK(in.groups >= 1 && in.heads % in.groups == 0 && in.head_dim >= 1);
  MS_CHECK(in.d_state >= 1 && in.d_state <= 256);
  MS_CHECK(in.z_stride >= channels && in.dt_stride >= in.heads);
  MS_CHECK(in.xbc_stride >= std::max(channels, in.groups * in.d_state));
  MS_CHECK(!in.seq_start.empty() && out.ssm_state.size() + 1 == in.seq_start.size());
  const int64_t units = in.heads * UnitsOfHead(in.head_dim);
  const int64_t tokens = in.seq_start.back() - in.seq_start.front();
  const bool alone = tokens * channels * in.d_state < kWorthSplitting;
  pool.Split(units, alone ? std::max<int64_t>(units, 1) : 1, [&](int64_t first, int64_t last) {
    HWY_DYNAMIC_DISPATCH(ScanUnits)(in, out, first, last);
  });
}

void SsdDelta(ThreadPool& pool, const float* dt, int64_t dt_stride, const float* dt_bias,
              float delta_min, float delta_max, int64_t tokens, int64_t heads, float* delta) {
  MS_CHECK(dt_stride >= heads);
  SsdInputs in;
  in.heads = heads;
  in.dt = dt;
  in.dt_stride = dt_stride;
  in.dt_bias = dt_bias;
  in.delta_min = delta_min;
  in.delta_max = delta_max;
  pool.Split(tokens, 256, [&](int64_t begin, int64_t end) {
    const auto row = HWY_DYNAMIC_DISPATCH(DeltaRow);
    for (int64_t i = begin; i < end; ++i) row(in, i, delta + i * heads);
  });
}

}  // namespace mambascope::kernels
#endif
