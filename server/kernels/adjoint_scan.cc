// The functions of hidden_attention.h that are linear in the number of tokens: rows of alpha, and
// products of the mean map with a vector, without any map.
#include <algorithm>
#include <cstring>

#include "server/base/check.h"
#include "server/kernels/channel_group.h"
#include "server/kernels/hidden_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/adjoint_scan.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

#include "hwy/cache_control.h"

#ifndef MAMBASCOPE_KERNELS_ADJOINT_SCAN_ONCE_
#define MAMBASCOPE_KERNELS_ADJOINT_SCAN_ONCE_
namespace mambascope::kernels {

// Channels of one task; one AVX-512 register, so that most groups need no copy of their delta.
constexpr int64_t kGroup = 16;
// A group reads one cache line of each token's delta, too far apart for the hardware to foresee.
constexpr int64_t kPrefetchTokens = 4;

}  // namespace mambascope::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

// From token `from` down to 0, for the channels of `group`:
//   g += v[j] C[j];   emit(j, delta[j] sum_n B[j, n] g[n]);   g *= exp(delta[j] A)
// with g starting at `start` [d_state], or at zero. `v` may be null. `emit` gets the first lane's
// channel too. `state` is scratch, [d_state, kGroup].
template <class Emit>
void AdjointScan(const ScanParameters& scan, const ChannelGroup& group, const float* start,
                 int64_t from, const float* v, float* state, const Emit& emit) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t c = 0; c < kGroup; c += lanes) {
    for (int64_t n = 0; n < scan.d_state; ++n) {
      hn::Store(hn::Set(d, start == nullptr ? 0.0f : start[n]), d, state + n * lanes);
    }
    for (int64_t j = from; j >= 0; --j) {
      hwy::Prefetch(group.delta(std::max<int64_t>(0, j - kPrefetchTokens)) + c);
      const float* B = scan.B + j * scan.bc_stride;
      if (v != nullptr && v[j] != 0) {
        const float* C = scan.C + j * scan.bc_stride;
        for (int64_t n = 0; n < scan.d_state; ++n) {
          const Vec g = hn::Load(d, state + n * lanes);
          hn::Store(hn::Add(g, hn::Set(d, v[j] * C[n])), d, state + n * lanes);
        }
      }
      const Vec delta = hn::LoadU(d, group.delta(j) + c);
      Vec sum = hn::Zero(d);
      for (int64_t n = 0; n < scan.d_state; ++n) {
        const Vec g = hn::Load(d, state + n * lanes);
        const Vec A = hn::LoadU(d, group.A() + n * kGroup + c);
        sum = hn::MulAdd(hn::Set(d, B[n]), g, sum);
        hn::Store(hn::Mul(g, Exp2NonPositive(d, hn::Mul(delta, A))), d, state + n * lanes);
      }
      emit(j, c, hn::Mul(sum, delta));
    }
  }
}

// sums[i] = sum over the group's channels and j of alpha[i, j] v[j].
void ForwardSums(const ScanParameters& scan, const ChannelGroup& group, const float* v,
                 float* state, float* sums) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t c = 0; c < kGroup; c += lanes) {
    for (int64_t n = 0; n < scan.d_state; ++n) hn::Store(hn::Zero(d), d, state + n * lanes);
    for (int64_t i = 0; i < scan.tokens; ++i) {
      hwy::Prefetch(group.delta(std::min(scan.tokens - 1, i + kPrefetchTokens)) + c);
      const float* B = scan.B + i * scan.bc_stride;
      const float* C = scan.C + i * scan.bc_stride;
      const Vec delta = hn::LoadU(d, group.delta(i) + c);
      const Vec input = hn::Mul(delta, hn::Set(d, v[i]));
      Vec sum = hn::Zero(d);
      for (int64_t n = 0; n < scan.d_state; ++n) {
        const Vec A = hn::LoadU(d, group.A() + n * kGroup + c);
        const Vec decay = Exp2NonPositive(d, hn::Mul(delta, A));
        const Vec h =
            hn::MulAdd(decay, hn::Load(d, state + n * lanes), hn::Mul(input, hn::Set(d, B[n])));
        hn::Store(h, d, state + n * lanes);
        sum = hn::MulAdd(hn::Set(d, C[n]), h, sum);
      }
      const float total = hn::GetLane(hn::SumOfLanes(d, sum));
      sums[i] = c == 0 ? total : sums[i] + total;
    }
  }
}

void AdjointSums(const ScanParameters& scan, const ChannelGroup& group, const float* v,
                 float* state, float* sums) {
  const F32 d;
  AdjointScan(scan, group, nullptr, scan.tokens - 1, v, state,
              [&](int64_t j, int64_t c, Vec values) {
                const float total = hn::GetLane(hn::SumOfLanes(d, values));
                sums[j] = c == 0 ? total : sums[j] + total;
              });
}

// `rows` points at the group's first channel in row 0.
void AdjointRows(const ScanParameters& scan, const ChannelGroup& group, const float* start,
                 int64_t from, float* state, float* rows) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  AdjointScan(scan, group, start, from, nullptr, state, [&](int64_t j, int64_t c, Vec values) {
    float* row = rows + j * scan.d_inner + c;
    const int64_t left = group.count() - c;
    if (left >= lanes) {
      hn::StoreU(values, d, row);
    } else if (left > 0) {
      StorePart(values, d, row, left);
    }
  });
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(ForwardSums);
HWY_EXPORT(AdjointSums);
HWY_EXPORT(AdjointRows);

int64_t Groups(int64_t channels) { return (channels + kGroup - 1) / kGroup; }

// out = the mean over channels of what `sums` computes for each group. Groups are added in their
// order, whichever thread computed them.
template <class Sums>
void MeanOfGroups(ThreadPool& pool, const ScanParameters& scan, std::span<const int32_t> channels,
                  float* out, const Sums& sums) {
  const int64_t count = ChannelCount(scan, channels), groups = Groups(count);
  Array<float> parts(groups * scan.tokens);
  pool.Run(groups, [&](int64_t g) {
    Array<float> state(scan.d_state * kGroup);
    const ChannelGroup group(scan, channels, g * kGroup, kGroup);
    sums(group, state.data(), parts.data() + g * scan.tokens);
  });
  for (int64_t i = 0; i < scan.tokens; ++i) {
    float sum = 0;
    for (int64_t g = 0; g < groups; ++g) sum += parts[g * scan.tokens + i];
    out[i] = sum / static_cast<float>(count);
  }
}

}  // namespace

void TargetRows(ThreadPool& pool, const ScanParameters& scan, int64_t target,
                bool without_target_decay, float* rows) {
  MS_CHECK(0 <= target && target < scan.tokens);
  const int64_t from = without_target_decay ? target - 1 : target;
  std::memset(rows + (from + 1) * scan.d_inner, 0,
              (scan.tokens - 1 - from) * scan.d_inner * sizeof(float));
  pool.Run(Groups(scan.d_inner), [&](int64_t g) {
    Array<float> state(scan.d_state * kGroup);
    const ChannelGroup group(scan, {}, g * kGroup, kGroup);
    HWY_DYNAMIC_DISPATCH(AdjointRows)
    (scan, group, scan.C + target * scan.bc_stride, from, state.data(), rows + g * kGroup);
  });
}

void MeanAdjoint(ThreadPool& pool, const ScanParameters& scan, std::span<const int32_t> channels,
                 const float* v, float* out) {
  MeanOfGroups(pool, scan, channels, out,
               [&](const ChannelGroup& group, float* state, float* sums) {
                 HWY_DYNAMIC_DISPATCH(AdjointSums)(scan, group, v, state, sums);
               });
}

void MeanForward(ThreadPool& pool, const ScanParameters& scan, std::span<const int32_t> channels,
                 const float* v, float* out) {
  MeanOfGroups(pool, scan, channels, out,
               [&](const ChannelGroup& group, float* state, float* sums) {
                 HWY_DYNAMIC_DISPATCH(ForwardSums)(scan, group, v, state, sums);
               });
}

}  // namespace mambascope::kernels
#endif
