#include "server/kernels/scan_backward.h"

#include <algorithm>

#include "server/base/array.h"
#include "server/base/check.h"
#include "server/kernels/sum_parts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/scan_backward.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/lane_rows-inl.h"

#ifndef MAMBASCOPE_KERNELS_SCAN_BACKWARD_ONCE_
#define MAMBASCOPE_KERNELS_SCAN_BACKWARD_ONCE_
namespace mambascope::kernels {

// Channels of one task, whose parts of dB and dC are added before those of other tasks.
constexpr int64_t kGroup = 128;
// Tokens between two states that are kept.
constexpr int64_t kChunk = 8;
constexpr int64_t kMaxLanes = 16;  // the widest register's
constexpr int64_t kMaxRows = 16;   // states that are in registers at a time

// Channels [first, first + count) of a scan.
struct ChannelRange {
  int64_t first, count;
};

// What one group needs while it runs.
struct GroupScratch {
  float* A;        // [d_state, kGroup]
  float* carry;    // [d_state, kGroup]
  float* states;   // [chunks, d_state, kGroup]
  float *dB, *dC;  // lane sums, [kChunk, d_state, one register]
};

inline int64_t Chunks(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }
// Floats of the lane sums of dB, and of dC, which are added by whole registers of sums.
inline int64_t LaneSums(int64_t d_state) {
  return (kChunk * d_state + kMaxLanes - 1) / kMaxLanes * kMaxLanes * kMaxLanes;
}
inline int64_t Groups(int64_t channels) { return (channels + kGroup - 1) / kGroup; }

}  // namespace mambascope::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// One register of channels over the tokens of a chunk; `u` and `w` are sums over states.
struct Tile {
  HWY_ALIGN float delta[kChunk * kMaxLanes];
  HWY_ALIGN float x[kChunk * kMaxLanes];
  HWY_ALIGN float drive[kChunk * kMaxLanes];  // delta x
  HWY_ALIGN float dy[kChunk * kMaxLanes];
  HWY_ALIGN float u[kChunk * kMaxLanes];  // sum_n B G
  HWY_ALIGN float w[kChunk * kMaxLanes];  // sum_n A Abar state[i-1] G, A times log2(e)
  // Of a block of states, between the way there and the way back.
  HWY_ALIGN float decay[kChunk * kMaxRows * kMaxLanes];
  HWY_ALIGN float kept[kChunk * kMaxRows * kMaxLanes];  // Abar state[i-1]
};

// The rows of a matrix [tokens, stride] at one register of channels, into a tile's row after row.
// Rows lie kilobytes apart, which no hardware prefetcher follows: the same channels of the next
// chunk are fetched meanwhile, into the second-level cache because such a stride meets few sets of
// the first.
void LoadTile(const float* rows, int64_t stride, int64_t tokens, int64_t count, int64_t next,
              float* tile) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < tokens; ++i) {
    hn::Store(LoadLanes(d, rows + i * stride, count), d, tile + i * lanes);
    __builtin_prefetch(rows + (i + next) * stride, /*write=*/0, /*second level*/ 2);
  }
}

// A [d_state, d_inner] of the range, register after register of channels, times log2(e).
void LoadA(const ScanParameters& scan, ChannelRange range, float* A) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t c = 0; c < range.count; c += lanes) {
    for (int64_t n = 0; n < scan.d_state; ++n, A += lanes) {
      const float* row = scan.A + n * scan.d_inner + range.first + c;
      const Vec A_n = LoadLanes(d, row, range.count - c);
      hn::Store(hn::Mul(A_n, hn::Set(d, 1.44269504f)), d, A);
    }
  }
}

// Calls block.template operator()<rows>(n) for blocks of rows that fit into registers and cover
// [0, d_state).
template <class Block>
HWY_INLINE void ForBlocks(int64_t d_state, const Block& block) {
  int64_t n = 0;
  for (; n + 16 <= d_state; n += 16) block.template operator()<16>(n);
  for (; n + 4 <= d_state; n += 4) block.template operator()<4>(n);
  for (; n < d_state; ++n) block.template operator()<1>(n);
}

// kRows states of one register of channels from the chunk's last token to its first, for the
// adjoint. B and C are the block's in the first row, `carry` holds Abar[i+1] G[i+1].
template <int kRows>
void AdjointBlock(const float* B, const float* C, int64_t stride, int64_t tokens, const float* A,
                  float* carry, Tile& t) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec g[kRows];
#pragma GCC unroll 16
  for (int n = 0; n < kRows; ++n) g[n] = hn::Load(d, carry + n * lanes);
  for (int64_t i = tokens - 1; i >= 0; --i) {
    const float *B_i = B + i * stride, *C_i = C + i * stride;
    const Vec delta = hn::Load(d, t.delta + i * lanes), dy = hn::Load(d, t.dy + i * lanes);
    Vec u[2] = {hn::Load(d, t.u + i * lanes), hn::Zero(d)};
#pragma GCC unroll 16
    for (int n = 0; n < kRows; ++n) {
      const Vec decay = Exp2NonPositive(d, hn::Mul(delta, hn::Load(d, A + n * lanes)));
      g[n] = hn::MulAdd(dy, hn::Set(d, C_i[n]), g[n]);
      u[n % 2] = hn::MulAdd(hn::Set(d, B_i[n]), g[n], u[n % 2]);
      g[n] = hn::Mul(g[n], decay);
    }
    hn::Store(hn::Add(u[0], u[1]), d, t.u + i * lanes);
  }
#pragma GCC unroll 16
  for (int n = 0; n < kRows; ++n) hn::Store(g[n], d, carry + n * lanes);
}

// dx (+)= delta u of one register of channels.
void StoreDx(const Tile& t, int64_t stride, int64_t tokens, int64_t count, bool accumulate,
             float* dx) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < tokens; ++i, dx += stride) {
    Vec v = hn::Mul(hn::Load(d, t.delta + i * lanes), hn::Load(d, t.u + i * lanes));
    if (accumulate) v = hn::Add(v, LoadLanes(d, dx, count));
    StoreLanes(v, d, dx, count);
  }
}

// `A` and `carry` are scratch, [d_state, kGroup].
void AdjointGroup(const ScanParameters& scan, ChannelRange range, const float* dy, float* dx,
                  bool accumulate, float* A, float* carry) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), D = scan.d_inner, stride = scan.bc_stride;
  Tile t;
  LoadA(scan, range, A);
  std::fill_n(carry, scan.d_state * kGroup, 0.0f);
  for (int64_t chunk = Chunks(scan.tokens) - 1; chunk >= 0; --chunk) {
    const int64_t begin = chunk * kChunk, tokens = std::min(kChunk, scan.tokens - begin);
    const float *B = scan.B + begin * stride, *C = scan.C + begin * stride;
    const int64_t next = chunk > 0 ? -kChunk : 0;
    for (int64_t c = 0; c < range.count; c += lanes) {
      const int64_t at = begin * D + range.first + c, count = range.count - c;
      LoadTile(scan.delta + at, D, tokens, count, next, t.delta);
      LoadTile(dy + at, D, tokens, count, next, t.dy);
      std::fill_n(t.u, tokens * lanes, 0.0f);
      ForBlocks(scan.d_state, [&]<int kRows>(int64_t n) {
        const int64_t row = c * scan.d_state + n * lanes;
        AdjointBlock<kRows>(B + n, C + n, stride, tokens, A + row, carry + row, t);
      });
      StoreDx(t, D, tokens, count, accumulate, dx + at);
    }
  }
}

// kRows states of one register over the chunk's tokens: `state` goes on from token to token.
template <int kRows>
void AdvanceBlock(const float* B, int64_t stride, int64_t tokens, const float* A, float* state,
                  const Tile& t) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec h[kRows];
#pragma GCC unroll 16
  for (int n = 0; n < kRows; ++n) h[n] = hn::Load(d, state + n * lanes);
  for (int64_t i = 0; i < tokens; ++i, B += stride) {
    const Vec delta = hn::Load(d, t.delta + i * lanes);
    const Vec drive = hn::Load(d, t.drive + i * lanes);
#pragma GCC unroll 16
    for (int n = 0; n < kRows; ++n) {
      const Vec decay = Exp2NonPositive(d, hn::Mul(delta, hn::Load(d, A + n * lanes)));
      h[n] = hn::MulAdd(drive, hn::Set(d, B[n]), hn::Mul(decay, h[n]));
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < kRows; ++n) hn::Store(h[n], d, state + n * lanes);
}

// The same again from the kept `state`, leaving in the tile what the way back needs. `dC` are sums
// for each lane, [tokens, d_state, one register], at the block's first state.
template <int kRows>
void ReplayBlock(const float* B, int64_t stride, int64_t tokens, int64_t d_state, const float* A,
                 const float* state, float* dC, Tile& t) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec h[kRows];
#pragma GCC unroll 16
  for (int n = 0; n < kRows; ++n) h[n] = hn::Load(d, state + n * lanes);
  for (int64_t i = 0; i < tokens; ++i, B += stride, dC += d_state * lanes) {
    const Vec delta = hn::Load(d, t.delta + i * lanes);
    const Vec drive = hn::Load(d, t.drive + i * lanes), dy = hn::Load(d, t.dy + i * lanes);
    float *decays = t.decay + i * kRows * lanes, *kept = t.kept + i * kRows * lanes;
#pragma GCC unroll 16
    for (int n = 0; n < kRows; ++n) {
      const Vec decay = Exp2NonPositive(d, hn::Mul(delta, hn::Load(d, A + n * lanes)));
      const Vec kept_n = hn::Mul(decay, h[n]);
      hn::Store(decay, d, decays + n * lanes);
      hn::Store(kept_n, d, kept + n * lanes);
      h[n] = hn::MulAdd(drive, hn::Set(d, B[n]), kept_n);
      hn::Store(hn::MulAdd(dy, h[n], hn::Load(d, dC + n * lanes)), d, dC + n * lanes);
    }
  }
}

// And back, with `carry` as in AdjointBlock and `dB` as dC above.
template <int kRows>
void BackwardBlock(const float* B, const float* C, int64_t stride, int64_t tokens, int64_t d_state,
                   const float* A, float* carry, float* dB, Tile& t) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec g[kRows];
#pragma GCC unroll 16
  for (int n = 0; n < kRows; ++n) g[n] = hn::Load(d, carry + n * lanes);
  for (int64_t i = tokens - 1; i >= 0; --i) {
    const float *B_i = B + i * stride, *C_i = C + i * stride;
    const float *decays = t.decay + i * kRows * lanes, *kept = t.kept + i * kRows * lanes;
    float* dB_i = dB + i * d_state * lanes;
    const Vec drive = hn::Load(d, t.drive + i * lanes), dy = hn::Load(d, t.dy + i * lanes);
    Vec u = hn::Load(d, t.u + i * lanes), w = hn::Load(d, t.w + i * lanes);
#pragma GCC unroll 16
    for (int n = 0; n < kRows; ++n) {
      g[n] = hn::MulAdd(dy, hn::Set(d, C_i[n]), g[n]);
      u = hn::MulAdd(hn::Set(d, B_i[n]), g[n], u);
      hn::Store(hn::MulAdd(drive, g[n], hn::Load(d, dB_i + n * lanes)), d, dB_i + n * lanes);
      const Vec moved = hn::Mul(g[n], hn::Load(d, A + n * lanes));
      w = hn::MulAdd(moved, hn::Load(d, kept + n * lanes), w);
      g[n] = hn::Mul(g[n], hn::Load(d, decays + n * lanes));
    }
    hn::Store(u, d, t.u + i * lanes);
    hn::Store(w, d, t.w + i * lanes);
  }
#pragma GCC unroll 16
  for (int n = 0; n < kRows; ++n) hn::Store(g[n], d, carry + n * lanes);
}

// ddelta = x u + w of one register of channels.
void StoreDdelta(const Tile& t, int64_t stride, int64_t tokens, int64_t count, float* ddelta) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < tokens; ++i, ddelta += stride) {
    const Vec w = hn::Mul(hn::Load(d, t.w + i * lanes), hn::Set(d, 0.693147181f));  // of log2(e) A
    const Vec x = hn::Load(d, t.x + i * lanes);
    StoreLanes(hn::MulAdd(x, hn::Load(d, t.u + i * lanes), w), d, ddelta, count);
  }
}

// delta, x and delta x of one register of channels.
void LoadInputs(const ScanParameters& scan, const float* x, int64_t at, int64_t tokens,
                int64_t count, int64_t next, Tile& t) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  LoadTile(scan.delta + at, scan.d_inner, tokens, count, next, t.delta);
  LoadTile(x + at, scan.d_inner, tokens, count, next, t.x);
  for (int64_t i = 0; i < tokens * lanes; i += lanes) {
    hn::Store(hn::Mul(hn::Load(d, t.delta + i), hn::Load(d, t.x + i)), d, t.drive + i);
  }
}

// sums[k] = the sum over the lanes of register k; `lane_sums` has room for whole registers of sums.
void SumLanes(const float* lane_sums, int64_t count, float* sums) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t k = 0; k < count; k += lanes) {
    StoreLanes(SumsOfRegisters(d, lane_sums + k * lanes), d, sums + k, count - k);
  }
}

// The states before each chunk: states [chunks, d_state, kGroup]; the first are zero.
void KeepStates(const ScanParameters& scan, ChannelRange range, const float* x, const float* A,
                float* states, Tile& t) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), size = scan.d_state * kGroup, stride = scan.bc_stride;
  std::fill_n(states, size, 0.0f);
  for (int64_t chunk = 0; chunk + 1 < Chunks(scan.tokens); ++chunk, states += size) {
    const int64_t begin = chunk * kChunk;
    const int64_t next = std::min(kChunk, scan.tokens - kChunk - begin);
    std::copy_n(states, size, states + size);
    for (int64_t c = 0; c < range.count; c += lanes) {
      LoadInputs(scan, x, begin * scan.d_inner + range.first + c, kChunk, range.count - c, next, t);
      ForBlocks(scan.d_state, [&]<int kRows>(int64_t n) {
        const int64_t row = c * scan.d_state + n * lanes;
        AdvanceBlock<kRows>(scan.B + begin * stride + n, stride, kChunk, A + row,
                            states + size + row, t);
      });
    }
  }
}

// One group's dx and ddelta, and its parts of dB and dC, [tokens, d_state] each.
void BackwardGroup(const ScanParameters& scan, ChannelRange range, const float* x, const float* dy,
                   const ScanGradients& out, const GroupScratch& s, float* dB, float* dC) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), D = scan.d_inner, N = scan.d_state, stride = scan.bc_stride;
  Tile t;
  LoadA(scan, range, s.A);
  KeepStates(scan, range, x, s.A, s.states, t);
  std::fill_n(s.carry, N * kGroup, 0.0f);
  for (int64_t chunk = Chunks(scan.tokens) - 1; chunk >= 0; --chunk) {
    const int64_t begin = chunk * kChunk, tokens = std::min(kChunk, scan.tokens - begin);
    const float *B = scan.B + begin * stride, *C = scan.C + begin * stride;
    const float* states = s.states + chunk * N * kGroup;
    const int64_t next = chunk > 0 ? -kChunk : 0;
    std::fill_n(s.dB, LaneSums(N), 0.0f);
    std::fill_n(s.dC, LaneSums(N), 0.0f);
    for (int64_t c = 0; c < range.count; c += lanes) {
      const int64_t at = begin * D + range.first + c, count = range.count - c;
      LoadInputs(scan, x, at, tokens, count, next, t);
      LoadTile(dy + at, D, tokens, count, next, t.dy);
      std::fill_n(t.u, tokens * lanes, 0.0f);
      std::fill_n(t.w, tokens * lanes, 0.0f);
      ForBlocks(N, [&]<int kRows>(int64_t n) {
        const int64_t row = c * N + n * lanes;
        ReplayBlock<kRows>(B + n, stride, tokens, N, s.A + row, states + row, s.dC + n * lanes, t);
        BackwardBlock<kRows>(B + n, C + n, stride, tokens, N, s.A + row, s.carry + row,
                             s.dB + n * lanes, t);
      });
      StoreDx(t, D, tokens, count, out.accumulate_dx, out.dx + at);
      StoreDdelta(t, D, tokens, count, out.ddelta + at);
    }
    SumLanes(s.dB, tokens * N, dB + begin * N);
    SumLanes(s.dC, tokens * N, dC + begin * N);
  }
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(AdjointGroup);
HWY_EXPORT(BackwardGroup);

// Floats of one group's scratch.
int64_t GroupFloats(int64_t tokens, int64_t d_state) {
  return (2 + Chunks(tokens)) * d_state * kGroup + 2 * LaneSums(d_state);
}

void Check(const ScanParameters& scan) {
  MS_CHECK(scan.tokens >= 0 && scan.d_inner >= 0 && scan.bc_stride >= scan.d_state);
  MS_CHECK(scan.d_state >= 1 && scan.d_state <= 256);
}

ChannelRange RangeOf(const ScanParameters& scan, int64_t group) {
  return {group * kGroup, std::min(kGroup, scan.d_inner - group * kGroup)};
}

}  // namespace

void ScanAdjoint(ThreadPool& pool, const ScanParameters& scan, const float* dy, float* dx,
                 bool accumulate) {
  Check(scan);
  pool.Run(Groups(scan.d_inner), [&](int64_t group) {
    Array<float> A(scan.d_state * kGroup), carry(scan.d_state * kGroup);
    HWY_DYNAMIC_DISPATCH(AdjointGroup)
    (scan, RangeOf(scan, group), dy, dx, accumulate, A.data(), carry.data());
  });
}

void ScanBackward(ThreadPool& pool, const ScanParameters& scan, const float* x, const float* dy,
                  const ScanGradients& out) {
  Check(scan);
  MS_CHECK(out.bc_stride >= scan.d_state);
  const int64_t N = scan.d_state, groups = Groups(scan.d_inner), part = scan.tokens * N;
  Array<float> parts(2 * groups * part);
  pool.Run(groups, [&](int64_t group) {
    Array<float> memory(GroupFloats(scan.tokens, N));
    GroupScratch s;
    s.A = memory.data();
    s.carry = s.A + N * kGroup;
    s.dB = s.carry + N * kGroup;
    s.dC = s.dB + LaneSums(N);
    s.states = s.dC + LaneSums(N);
    float* dB = parts.data() + 2 * group * part;
    HWY_DYNAMIC_DISPATCH(BackwardGroup)
    (scan, RangeOf(scan, group), x, dy, out, s, dB, dB + part);
  });
  pool.Split(scan.tokens, 64, [&](int64_t begin, int64_t end) {
    SumParts(parts.data(), 2 * part, groups, begin, end, N, out.bc_stride, out.dB);
    SumParts(parts.data() + part, 2 * part, groups, begin, end, N, out.bc_stride, out.dC);
  });
}

int64_t ScanBackwardBytes(int64_t tokens, int64_t d_inner, int64_t d_state, int threads) {
  const int64_t groups = Groups(d_inner), at_once = std::min<int64_t>(threads, groups);
  const int64_t floats =
      2 * groups * tokens * d_state + at_once * GroupFloats(tokens, d_state) + 16 * (at_once + 1);
  return floats * static_cast<int64_t>(sizeof(float));
}

}  // namespace mambascope::kernels
#endif
