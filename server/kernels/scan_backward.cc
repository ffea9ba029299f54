#include "server/kernels/scan_backward.h"

#include <algorithm>

#include "server/base/array.h"
#include "server/base/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/scan_backward.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/lane_rows-inl.h"

#ifndef MAMBASCOPE_KERNELS_SCAN_BACKWARD_ONCE_
#define MAMBASCOPE_KERNELS_SCAN_BACKWARD_ONCE_
namespace mambascope::kernels {

// Channels of one task, whose parts of dB and dC are added before those of other tasks.
constexpr int64_t kGroup = 64;
// Tokens between two states that are kept.
constexpr int64_t kChunk = 16;
constexpr int64_t kMaxLanes = 16;  // the widest register's
constexpr int64_t kMaxRows = 16;   // states that are in registers at a time

// Channels [first, first + count) of a scan.
struct ChannelRange {
  int64_t first, count;
};

inline int64_t Chunks(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }
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

}  // namespace
}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(AdjointGroup);

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

}  // namespace mambascope::kernels
#endif
