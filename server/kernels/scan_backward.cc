#include "server/kernels/scan_backward.h"

#include <algorithm>

#include "server/base/array.h"
#include "server/base/check.h"
#include "server/kernels/scan_group.h"
#include "server/kernels/sum_parts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/scan_backward.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/scan_tile-inl.h"

#ifndef MAMBASCOPE_KERNELS_SCAN_BACKWARD_ONCE_
#define MAMBASCOPE_KERNELS_SCAN_BACKWARD_ONCE_
namespace mambascope::kernels {

// What one block needs while it runs.
struct ScanScratch {
  float* A;        // [d_state, kScanBlock]
  float* carry;    // [d_state, kScanBlock]
  float* states;   // [chunks, d_state, kScanBlock]
  float *dB, *dC;  // lane sums, [kScanChunk, d_state, one register]
};

// Floats of the lane sums of dB, and of dC, which are added by whole registers of sums.
inline int64_t LaneSums(int64_t d_state) {
  return (kScanChunk * d_state + kMaxLanes - 1) / kMaxLanes * kMaxLanes * kMaxLanes;
}

}  // namespace mambascope::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// kRows states of one register over the chunk's tokens: `state` goes on from token to token.
template <int kRows>
void AdvanceBlock(const float* B, int64_t stride, int64_t tokens, const float* A, float* state,
                  const ScanTile& t) {
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
                 const float* state, float* dC, ScanTile& t) {
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
                   const float* A, float* carry, float* dB, ScanTile& t) {
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
void StoreDdelta(const ScanTile& t, int64_t stride, int64_t tokens, int64_t count, float* ddelta) {
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
                int64_t count, int64_t next, ScanTile& t) {
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

// The states before each chunk: states [chunks, d_state, kScanBlock]; the first are zero.
void KeepStates(const ScanParameters& scan, ChannelRange range, const float* x, const float* A,
                float* states, ScanTile& t) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), size = scan.d_state * kScanBlock, stride = scan.bc_stride;
  std::fill_n(states, size, 0.0f);
  for (int64_t chunk = 0; chunk + 1 < ScanChunks(scan.tokens); ++chunk, states += size) {
    const int64_t begin = chunk * kScanChunk;
    const int64_t next = std::min(kScanChunk, scan.tokens - kScanChunk - begin);
    std::copy_n(states, size, states + size);
    for (int64_t c = 0; c < range.count; c += lanes) {
      LoadInputs(scan, x, begin * scan.d_inner + range.first + c, kScanChunk, range.count - c, next,
                 t);
      ForBlocks(scan.d_state, [&]<int kRows>(int64_t n) {
        const int64_t row = c * scan.d_state + n * lanes;
        AdvanceBlock<kRows>(scan.B + begin * stride + n, stride, kScanChunk, A + row,
                            states + size + row, t);
      });
    }
  }
}

// dx and ddelta of the channels of a group over one chunk, and the chunk's part of dB and dC.
// `first` is the group's first channel in its block.
void BackwardChunk(const ScanParameters& scan, ChannelRange block, int64_t first, int64_t chunk,
                   const float* x, const float* dy, const ScanGradients& out, const ScanScratch& s,
                   float* dB, float* dC, ScanTile& t) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), D = scan.d_inner, N = scan.d_state, stride = scan.bc_stride;
  const int64_t begin = chunk * kScanChunk, tokens = std::min(kScanChunk, scan.tokens - begin);
  const float *B = scan.B + begin * stride, *C = scan.C + begin * stride;
  const float* states = s.states + chunk * N * kScanBlock;
  const int64_t next = chunk > 0 ? -kScanChunk : 0;
  std::fill_n(s.dB, LaneSums(N), 0.0f);
  std::fill_n(s.dC, LaneSums(N), 0.0f);
  for (int64_t c = first; c < std::min(first + kScanGroup, block.count); c += lanes) {
    const int64_t at = begin * D + block.first + c, count = block.count - c;
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

// A block of whole groups; parts [groups, 2, tokens, d_state] from its first group on: dB and dC.
void BackwardRange(const ScanParameters& scan, ChannelRange block, const float* x, const float* dy,
                   const ScanGradients& out, const ScanScratch& s, float* parts) {
  const int64_t part = scan.tokens * scan.d_state;
  ScanTile t;
  LoadA(scan, block, s.A);
  KeepStates(scan, block, x, s.A, s.states, t);
  std::fill_n(s.carry, scan.d_state * kScanBlock, 0.0f);
  for (int64_t chunk = ScanChunks(scan.tokens) - 1; chunk >= 0; --chunk) {
    for (int64_t first = 0; first < block.count; first += kScanGroup) {
      float* dB = parts + first / kScanGroup * 2 * part;
      BackwardChunk(scan, block, first, chunk, x, dy, out, s, dB, dB + part, t);
    }
  }
}

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(BackwardRange);

// Floats of one block's scratch.
int64_t BlockFloats(int64_t tokens, int64_t d_state) {
  return (2 + ScanChunks(tokens)) * d_state * kScanBlock + 2 * LaneSums(d_state);
}

ScanScratch LayScratch(int64_t d_state, float* memory) {
  ScanScratch s;
  s.A = memory;
  s.carry = s.A + d_state * kScanBlock;
  s.dB = s.carry + d_state * kScanBlock;
  s.dC = s.dB + LaneSums(d_state);
  s.states = s.dC + LaneSums(d_state);
  return s;
}

}  // namespace

void ScanBackward(ThreadPool& pool, const ScanParameters& scan, const float* x, const float* dy,
                  const ScanGradients& out) {
  CheckScan(scan);
  MS_CHECK(out.bc_stride >= scan.d_state);
  if (scan.tokens == 0) return;
  const int64_t N = scan.d_state, groups = ScanGroups(scan.d_inner), part = scan.tokens * N;
  Array<float> parts(2 * groups * part);
  pool.Split(groups, 1, [&](int64_t begin, int64_t end) {
    Array<float> memory(BlockFloats(scan.tokens, N));
    const ScanScratch s = LayScratch(N, memory.data());
    const int64_t last = std::min(scan.d_inner, end * kScanGroup);
    ForScanBlocks(begin * kScanGroup, last, [&](ChannelRange block) {
      HWY_DYNAMIC_DISPATCH(BackwardRange)
      (scan, block, x, dy, out, s, parts.data() + block.first / kScanGroup * 2 * part);
    });
  });
  pool.Split(scan.tokens, 64, [&](int64_t begin, int64_t end) {
    SumParts(parts.data(), 2 * part, groups, begin, end, N, out.bc_stride, out.dB);
    SumParts(parts.data() + part, 2 * part, groups, begin, end, N, out.bc_stride, out.dC);
  });
}

int64_t ScanBackwardBytes(int64_t tokens, int64_t d_inner, int64_t d_state, int threads) {
  const int64_t groups = ScanGroups(d_inner), at_once = std::min<int64_t>(threads, groups);
  const int64_t floats =
      2 * groups * tokens * d_state + at_once * BlockFloats(tokens, d_state) + 16 * (at_once + 1);
  return floats * static_cast<int64_t>(sizeof(float));
}

}  // namespace mambascope::kernels
#endif
