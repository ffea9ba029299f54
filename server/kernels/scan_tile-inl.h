// One register of channels over a chunk of tokens: what the backward passes of the selective scan
// share. Compiled once for each target (so no #pragma once).
#if defined(MAMBASCOPE_KERNELS_SCAN_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MAMBASCOPE_KERNELS_SCAN_TILE_INL_H_
#undef MAMBASCOPE_KERNELS_SCAN_TILE_INL_H_
#else
#define MAMBASCOPE_KERNELS_SCAN_TILE_INL_H_
#endif

#include <cstdint>

#include "server/kernels/lane_rows-inl.h"
#include "server/kernels/scan_group.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

// One register of channels over the tokens of a chunk; `u` and `w` are sums over states.
struct ScanTile {
  HWY_ALIGN float delta[kScanChunk * kMaxLanes];
  HWY_ALIGN float x[kScanChunk * kMaxLanes];
  HWY_ALIGN float drive[kScanChunk * kMaxLanes];  // delta x
  HWY_ALIGN float dy[kScanChunk * kMaxLanes];
  HWY_ALIGN float u[kScanChunk * kMaxLanes];  // sum_n B G
  HWY_ALIGN float w[kScanChunk * kMaxLanes];  // sum_n A Abar state[i-1] G, A times log2(e)
  // Of a block of states, between the way there and the way back.
  HWY_ALIGN float decay[kScanChunk * kMaxRows * kMaxLanes];
  HWY_ALIGN float kept[kScanChunk * kMaxRows * kMaxLanes];  // Abar state[i-1]
};

// The rows of a matrix [tokens, stride] at one register of channels, into a tile's row after row.
// Rows lie kilobytes apart, which no hardware prefetcher follows: the same channels of the next
// chunk are fetched meanwhile, into the second-level cache because such a stride meets few sets of
// the first.
inline void LoadTile(const float* rows, int64_t stride, int64_t tokens, int64_t count, int64_t next,
                     float* tile) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < tokens; ++i) {
    hn::Store(LoadLanes(d, rows + i * stride, count), d, tile + i * lanes);
    __builtin_prefetch(rows + (i + next) * stride, /*write=*/0, /*second level*/ 2);
  }
}

// A [d_state, d_inner] of the range, register after register of channels, times log2(e).
inline void LoadA(const ScanParameters& scan, ChannelRange range, float* A) {
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

// dx (+)= delta u of one register of channels.
inline void StoreDx(const ScanTile& t, int64_t stride, int64_t tokens, int64_t count,
                    bool accumulate, float* dx) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < tokens; ++i, dx += stride) {
    Vec v = hn::Mul(hn::Load(d, t.delta + i * lanes), hn::Load(d, t.u + i * lanes));
    if (accumulate) v = hn::Add(v, LoadLanes(d, dx, count));
    StoreLanes(v, d, dx, count);
  }
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
