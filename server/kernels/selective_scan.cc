#include "server/kernels/selective_scan.h"

#include <algorithm>

#include "server/base/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/selective_scan.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/lane_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// A block of channels passes over a sequence, kChunkTokens at a time, with its A and its states in
// the second-level cache; tile after tile of it, whose delta, delta x and y wait in the first for
// the three loops below. A block as wide as this reads whole pages of the tokens' rows: blocks of
// 128 channels, whose A and states would stay in the first cache, lost to the translation of
// addresses what they won. Lowest ms of 7 alternating rounds (512 / 1024 tokens, 1536 channels, 16
// states, one thread's CPU time, Sapphire Rapids VM under a load of 12): 2.3 / 4.8 against 2.5
// / 5.6 for blocks of 128; 2.4 / 4.9 for chunks of 16, 2.5 / 5.2 for tiles of 64.
constexpr int64_t kChunkTokens = 8;
constexpr int64_t kTileChannels = 128;
constexpr int64_t kBlockStates = 768 * 16;  // channels times d_state
constexpr int64_t kRegisterChannels = 16;   // the widest register's

struct Scratch {
  HWY_ALIGN float delta[kChunkTokens][kTileChannels];
  HWY_ALIGN float drive[kChunkTokens][kTileChannels];  // delta x
  HWY_ALIGN float y[kChunkTokens][kTileChannels];
  // Of the whole block, register after register of channels, d_state rows of one register each.
  HWY_ALIGN float A[kBlockStates];  // times log2(e)
  HWY_ALIGN float state[kBlockStates];
};

HWY_INLINE Vec BaseTwo(F32 d, Vec A) { return hn::Mul(A, hn::Set(d, 1.44269504f)); }

// One token's effect on one state: state -> decay * state + drive * B.
HWY_INLINE Vec Advance(F32 d, Vec delta, Vec drive, Vec A, float B, Vec state) {
  const Vec decay = Exp2NonPositive(d, hn::Mul(delta, A));
  return hn::MulAdd(decay, state, hn::Mul(drive, hn::Set(d, B)));
}

// The rows of a chunk lie kilobytes apart, some cache lines of each for a tile, which no hardware
// prefetcher follows: while a tile's recurrence runs, the next one's lines are fetched, into the
// second-level cache because such a stride meets few sets of the first.
struct NextTile {
  const float *dt, *x, *z;
  float* gated;
  int64_t stride, z_stride, tokens, channels;
  HWY_INLINE void Prefetch(int64_t token, int64_t channel) const {
    if (token >= tokens || channel >= channels) return;
    __builtin_prefetch(dt + token * stride + channel, /*write=*/0, /*second level*/ 2);
    __builtin_prefetch(x + token * stride + channel, 0, 2);
    __builtin_prefetch(z + token * z_stride + channel, 0, 2);
    __builtin_prefetch(gated + token * stride + channel, /*write=*/1, 2);
  }
};

// y and the states of one register of the tile, from channel `at` on, for the tokens in the
// scratch; B and C point at the first one's row, A and states [d_state, one register] into the
// scratch. The sum over states is taken in two halves, even and odd, which do not wait for each
// other.
void Recur(const ScanInputs& in, const float* B, const float* C, int64_t tokens, int64_t at,
           const float* A, float* states, const NextTile& next, Scratch& s) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < tokens; ++i, B += in.bc_stride, C += in.bc_stride) {
    next.Prefetch(i, at);
    const Vec delta = hn::Load(d, s.delta[i] + at), drive = hn::Load(d, s.drive[i] + at);
    Vec even = hn::Zero(d), odd = hn::Zero(d);
    for (int64_t n = 0; n < in.d_state; ++n) {
      float* row = states + n * lanes;
      const Vec state =
          Advance(d, delta, drive, hn::Load(d, A + n * lanes), B[n], hn::Load(d, row));
      hn::Store(state, d, row);
      Vec& y = n % 2 == 0 ? even : odd;
      y = hn::MulAdd(state, hn::Set(d, C[n]), y);
    }
    hn::Store(hn::Add(even, odd), d, s.y[i] + at);
  }
}

// The same for d_state = kStates, with the states in registers.
template <int kStates>
void RecurInRegisters(const ScanInputs& in, const float* B, const float* C, int64_t tokens,
                      int64_t at, const float* A, float* states, const NextTile& next, Scratch& s) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec state[kStates];
#pragma GCC unroll 16
  for (int n = 0; n < kStates; ++n) state[n] = hn::Load(d, states + n * lanes);
  for (int64_t i = 0; i < tokens; ++i, B += in.bc_stride, C += in.bc_stride) {
    next.Prefetch(i, at);
    const Vec delta = hn::Load(d, s.delta[i] + at), drive = hn::Load(d, s.drive[i] + at);
    Vec even = hn::Zero(d), odd = hn::Zero(d);
#pragma GCC unroll 16
    for (int n = 0; n < kStates; n += 2) {
      state[n] = Advance(d, delta, drive, hn::Load(d, A + n * lanes), B[n], state[n]);
      even = hn::MulAdd(state[n], hn::Set(d, C[n]), even);
      state[n + 1] =
          Advance(d, delta, drive, hn::Load(d, A + (n + 1) * lanes), B[n + 1], state[n + 1]);
      odd = hn::MulAdd(state[n + 1], hn::Set(d, C[n + 1]), odd);
    }
    hn::Store(hn::Add(even, odd), d, s.y[i] + at);
  }
#pragma GCC unroll 16
  for (int n = 0; n < kStates; ++n) hn::Store(state[n], d, states + n * lanes);
}

// delta and drive of `count` channels from `channel` on of one token.
void Prepare(const ScanInputs& in, int64_t token, int64_t channel, int64_t count, float* delta,
             float* drive) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const float* dt = in.dt + token * in.d_inner + channel;
  const float* x = in.x + token * in.d_inner + channel;
  for (int64_t c = 0; c < count; c += lanes) {
    const Vec step = Softplus(d, LoadLanes(d, dt + c, count - c));
    hn::Store(step, d, delta + c);
    hn::Store(hn::Mul(step, LoadLanes(d, x + c, count - c)), d, drive + c);
  }
}

void Finish(const ScanInputs& in, const ScanOutputs& out, int64_t token, int64_t channel,
            int64_t count, const float* y) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), at = token * in.d_inner + channel;
  const float* x = in.x + at;
  const float* z = in.z + token * in.z_stride + channel;
  for (int64_t c = 0; c < count; c += lanes) {
    const int64_t left = count - c;
    const Vec y_c = hn::Load(d, y + c);
    if (out.y != nullptr) StoreLanes(y_c, d, out.y + at + c, left);
    const Vec skip = LoadLanes(d, in.D + channel + c, left);
    const Vec skipped = hn::MulAdd(skip, LoadLanes(d, x + c, left), y_c);
    const Vec gate = Silu(d, LoadLanes(d, z + c, left));
    StoreLanes(hn::Mul(skipped, gate), d, out.gated + at + c, left);
  }
}

// Tokens [begin, end) of a sequence for the block's channels; A is in the scratch.
void ScanSequence(const ScanInputs& in, const ScanOutputs& out, int64_t channel, int64_t count,
                  int64_t begin, int64_t end, float* ssm_state, Scratch& s) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), D = in.d_inner, N = in.d_state;
  for (int64_t c = 0; c < count; c += lanes) {
    for (int64_t n = 0; n < N; ++n) {
      const Vec state = LoadLanes(d, ssm_state + n * D + channel + c, count - c);
      hn::Store(state, d, s.state + c * N + n * lanes);
    }
  }
  for (int64_t first = begin; first < end; first += kChunkTokens) {
    const int64_t tokens = std::min(kChunkTokens, end - first);
    const float *B = in.B + first * in.bc_stride, *C = in.C + first * in.bc_stride;
    for (int64_t tile = 0; tile < count; tile += kTileChannels) {
      const int64_t width = std::min(kTileChannels, count - tile);
      for (int64_t i = 0; i < tokens; ++i) {
        Prepare(in, first + i, channel + tile, width, s.delta[i], s.drive[i]);
      }
      const bool more = tile + width < count;  // else the next chunk's first tile
      const int64_t after = more ? first : std::min(first + kChunkTokens, end - 1);
      const int64_t next_tile = more ? tile + width : 0;
      const int64_t at = after * D + channel + next_tile;
      const NextTile next{in.dt + at,
                          in.x + at,
                          in.z + after * in.z_stride + channel + next_tile,
                          out.gated + at,
                          D,
                          in.z_stride,
                          end - after,
                          count - next_tile};
      for (int64_t c = 0; c < width; c += lanes) {
        const float* A = s.A + (tile + c) * N;
        float* states = s.state + (tile + c) * N;
        switch (N) {
          case 16:
            RecurInRegisters<16>(in, B, C, tokens, c, A, states, next, s);
            break;
          case 8:
            RecurInRegisters<8>(in, B, C, tokens, c, A, states, next, s);
            break;
          default:
            Recur(in, B, C, tokens, c, A, states, next, s);
        }
      }
      for (int64_t i = 0; i < tokens; ++i) {
        Finish(in, out, first + i, channel + tile, width, s.y[i]);
      }
    }
  }
  for (int64_t c = 0; c < count; c += lanes) {
    for (int64_t n = 0; n < N; ++n) {
      const Vec state = hn::Load(d, s.state + c * N + n * lanes);
      StoreLanes(state, d, ssm_state + n * D + channel + c, count - c);
    }
  }
}

// One token of a sequence of its own: A and the states are read where they are, row after row.
void Step(const ScanInputs& in, const ScanOutputs& out, int64_t token, int64_t first, int64_t last,
          float* ssm_state, Scratch& s) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  constexpr int64_t kSlice = kChunkTokens * kTileChannels;  // channels for which there is room
  float *delta = s.delta[0], *drive = s.drive[0], *even = s.y[0], *odd = s.state;
  static_assert(kSlice <= kBlockStates);
  for (int64_t channel = first; channel < last; channel += kSlice) {
    const int64_t count = std::min(kSlice, last - channel);
    Prepare(in, token, channel, count, delta, drive);
    for (int64_t n = 0; n < in.d_state; ++n) {
      const float* A = in.A + n * in.d_inner + channel;
      float* states = ssm_state + n * in.d_inner + channel;
      const float B = in.B[token * in.bc_stride + n];
      const Vec C = hn::Set(d, in.C[token * in.bc_stride + n]);
      float* y = n % 2 == 0 ? even : odd;
      for (int64_t c = 0; c < count; c += lanes) {
        const Vec state = Advance(d, hn::Load(d, delta + c), hn::Load(d, drive + c),
                                  BaseTwo(d, LoadLanes(d, A + c, count - c)), B,
                                  LoadLanes(d, states + c, count - c));
        StoreLanes(state, d, states + c, count - c);
        const Vec sum = n < 2 ? hn::Zero(d) : hn::Load(d, y + c);
        hn::Store(hn::MulAdd(state, C, sum), d, y + c);
      }
    }
    for (int64_t c = 0; c < count; c += lanes) {
      const Vec other = in.d_state < 2 ? hn::Zero(d) : hn::Load(d, odd + c);
      hn::Store(hn::Add(hn::Load(d, even + c), other), d, even + c);
    }
    Finish(in, out, token, channel, count, even);
  }
}

void ScanRange(const ScanInputs& in, const ScanOutputs& out, int64_t begin, int64_t end) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), N = in.d_state;
  const int64_t block = kBlockStates / N / kRegisterChannels * kRegisterChannels;
  Scratch scratch;
  bool only_steps = true;
  for (size_t s = 0; s + 1 < in.seq_start.size(); ++s) {
    const int64_t first = in.seq_start[s], tokens = in.seq_start[s + 1] - first;
    if (tokens == 1) Step(in, out, first, begin, end, out.ssm_state[s], scratch);
    only_steps = only_steps && tokens <= 1;
  }
  if (only_steps) return;
  for (int64_t channel = begin; channel < end; channel += block) {
    const int64_t count = std::min(block, end - channel);
    for (int64_t c = 0; c < count; c += lanes) {
      for (int64_t n = 0; n < N; ++n) {
        const Vec A = LoadLanes(d, in.A + n * in.d_inner + channel + c, count - c);
        hn::Store(BaseTwo(d, A), d, scratch.A + c * N + n * lanes);
      }
    }
    for (size_t s = 0; s + 1 < in.seq_start.size(); ++s) {
      const int64_t first = in.seq_start[s], last = in.seq_start[s + 1];
      if (last - first < 2) continue;
      ScanSequence(in, out, channel, count, first, last, out.ssm_state[s], scratch);
    }
  }
}

void SoftplusRange(const float* dt, int64_t count, float* delta) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(Softplus(d, hn::LoadU(d, dt + i)), d, delta + i);
  }
  if (i < count) StorePart(Softplus(d, LoadPart(d, dt + i, count - i)), d, delta + i, count - i);
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(ScanRange);
HWY_EXPORT(SoftplusRange);

// The widest register holds 16 channels.
constexpr int64_t kSplitChannels = 16;
// Below this many exponentials, waking another thread costs more than the work.
constexpr int64_t kWorthSplitting = 16384;

}  // namespace

void SelectiveScan(ThreadPool& pool, const ScanInputs& in, const ScanOutputs& out) {
  MS_CHECK(in.d_state >= 1 && in.d_state <= 256 && in.z_stride >= in.d_inner);
  MS_CHECK(in.bc_stride >= in.d_state && !in.seq_start.empty());
  MS_CHECK(out.ssm_state.size() + 1 == in.seq_start.size());
  const int64_t tokens = in.seq_start.back() - in.seq_start.front();
  const bool alone = tokens * in.d_inner * in.d_state < kWorthSplitting;
  pool.Split(in.d_inner, alone ? std::max<int64_t>(in.d_inner, 1) : kSplitChannels,
             [&](int64_t begin, int64_t end) {
               HWY_DYNAMIC_DISPATCH(ScanRange)(in, out, begin, end);
             });
}

void Softplus(ThreadPool& pool, std::span<const float> dt, std::span<float> delta) {
  MS_CHECK(dt.size() == delta.size());
  pool.Split(static_cast<int64_t>(dt.size()), kWorthSplitting, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SoftplusRange)(dt.data() + begin, end - begin, delta.data() + begin);
  });
}

}  // namespace mambascope::kernels
#endif
