#include <algorithm>

#include "server/base/array.h"
#include "server/kernels/scan_backward.h"
#include "server/kernels/scan_group.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/scan_adjoint.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/scan_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// kRows states of one register of channels from the chunk's last token to its first, for the
// adjoint. B and C are the block's in the first row, `carry` holds Abar[i+1] G[i+1].
template <int kRows>
void AdjointBlock(const float* B, const float* C, int64_t stride, int64_t tokens, const float* A,
                  float* carry, ScanTile& t) {
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

// `A` and `carry` are scratch, [d_state, kScanBlock].
void AdjointRange(const ScanParameters& scan, ChannelRange range, const float* dy, float* dx,
                  bool accumulate, float* A, float* carry) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), D = scan.d_inner, stride = scan.bc_stride;
  ScanTile t;
  LoadA(scan, range, A);
  std::fill_n(carry, scan.d_state * kScanBlock, 0.0f);
  for (int64_t chunk = ScanChunks(scan.tokens) - 1; chunk >= 0; --chunk) {
    const int64_t begin = chunk * kScanChunk, tokens = std::min(kScanChunk, scan.tokens - begin);
    const float *B = scan.B + begin * stride, *C = scan.C + begin * stride;
    const int64_t next = chunk > 0 ? -kScanChunk : 0;
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

HWY_EXPORT(AdjointRange);

}  // namespace

void ScanAdjoint(ThreadPool& pool, const ScanParameters& scan, const float* dy, float* dx,
                 bool accumulate) {
  CheckScan(scan);
  pool.Split(scan.d_inner, kMaxLanes, [&](int64_t begin, int64_t end) {
    Array<float> A(scan.d_state * kScanBlock), carry(scan.d_state * kScanBlock);
    ForScanBlocks(begin, end, [&](ChannelRange range) {
      HWY_DYNAMIC_DISPATCH(AdjointRange)
      (scan, range, dy, dx, accumulate, A.data(), carry.data());
    });
  });
}

}  // namespace mambascope::kernels
#endif
