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

// Channels of one task. Each token's delta is a page of its own when d_inner is large, so a task
// takes several cache lines of it, unless that leaves few tasks: 16384 tokens are explained 64
// channels at a time, which was one task. On huge pages 16, 32 and 64 channels cost the same (0.22
// ns an exponential, AVX-512); on pages of 4 KiB 16384 tokens took 0.38, 0.35 and 0.31.
constexpr int64_t kWidestGroup = 64;
// Tokens are too far apart for the hardware to foresee: so many channels ahead.
constexpr int64_t kPrefetchChannels = 256;
constexpr int64_t kCacheLine = 16;  // floats

inline int64_t GroupWidth(int64_t channels) {
  return channels >= 8 * kWidestGroup ? kWidestGroup : 16;
}

}  // namespace mambascope::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

inline void Prefetch(const ChannelGroup& group, int64_t token) {
  for (int64_t c = 0; c < group.width(); c += kCacheLine) hwy::Prefetch(group.delta(token) + c);
}

// From token `from` down to 0, for the channels of `group`:
//   g += v[j] C[j];   emit(j, delta[j] sum_n B[j, n] g[n]);   g *= exp(delta[j] A)
// with g starting at `start` [d_state], or at zero. `v` may be null. `emit` also gets the first
// lane's channel. `state` is scratch, [d_state, width].
template <class Emit>
void AdjointScan(const ScanParameters& scan, const ChannelGroup& group, const float* start,
                 int64_t from, const float* v, float* state, const Emit& emit) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), width = group.width();
  const int64_t ahead = kPrefetchChannels / width;
  for (int64_t n = 0; n < scan.d_state; ++n) {
    std::fill_n(state + n * width, width, start == nullptr ? 0.0f : start[n]);
  }
  for (int64_t j = from; j >= 0; --j) {
    Prefetch(group, std::max<int64_t>(0, j - ahead));
    const float* B = scan.B + j * scan.bc_stride;
    const float* C = scan.C + j * scan.bc_stride;
    const bool enters = v != nullptr && v[j] != 0;
    for (int64_t c = 0; c < width; c += lanes) {
      const Vec delta = hn::LoadU(d, group.delta(j) + c);
      Vec sum = hn::Zero(d);
      for (int64_t n = 0; n < scan.d_state; ++n) {
        float* state_n = state + n * width + c;
        Vec g = hn::Load(d, state_n);
        if (enters) g = hn::Add(g, hn::Set(d, v[j] * C[n]));
        sum = hn::MulAdd(hn::Set(d, B[n]), g, sum);
        const Vec A = hn::LoadU(d, group.A() + n * width + c);
        hn::Store(hn::Mul(g, Exp2NonPositive(d, hn::Mul(delta, A))), d, state_n);
      }
      emit(j, c, hn::Mul(sum, delta));
    }
  }
}

// sums[i] = sum over the group's channels and j of alpha[i, j] v[j].
void ForwardSums(const ScanParameters& scan, const ChannelGroup& group, const float* v,
                 float* state, float* sums) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), width = group.width();
  const int64_t ahead = kPrefetchChannels / width;
  std::fill_n(state, scan.d_state * width, 0.0f);
  for (int64_t i = 0; i < scan.tokens; ++i) {
    Prefetch(group, std::min(scan.tokens - 1, i + ahead));
    const float* B = scan.B + i * scan.bc_stride;
    const float* C = scan.C + i * scan.bc_stride;
    Vec sum = hn::Zero(d);
    for (int64_t c = 0; c < width; c += lanes) {
      const Vec delta = hn::LoadU(d, group.delta(i) + c);
      const Vec input = hn::Mul(delta, hn::Set(d, v[i]));
      for (int64_t n = 0; n < scan.d_state; ++n) {
        float* state_n = state + n * width + c;
        const Vec A = hn::LoadU(d, group.A() + n * width + c);
        const Vec decay = Exp2NonPositive(d, hn::Mul(delta, A));
        const Vec h = hn::MulAdd(decay, hn::Load(d, state_n), hn::Mul(input, hn::Set(d, B[n])));
        hn::Store(h, d, state_n);
        sum = hn::MulAdd(hn::Set(d, C[n]), h, sum);
      }
    }
    sums[i] = hn::GetLane(hn::SumOfLanes(d, sum));
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

// out = the mean over channels of what `sums` computes for each group. Groups are added in their
// order, whichever thread computed them.
template <class Sums>
void MeanOfGroups(ThreadPool& pool, const ScanParameters& scan, std::span<const int32_t> channels,
                  float* out, const Sums& sums) {
  const int64_t count = ChannelCount(scan, channels), width = GroupWidth(count);
  const int64_t groups = (count + width - 1) / width;
  Array<float> parts(groups * scan.tokens);
  pool.Run(groups, [&](int64_t g) {
    Array<float> state(scan.d_state * width);
    const ChannelGroup group(scan, channels, g * width, width);
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
  const int64_t width = GroupWidth(scan.d_inner);
  pool.Run((scan.d_inner + width - 1) / width, [&](int64_t g) {
    Array<float> state(scan.d_state * width);
    const ChannelGroup group(scan, {}, g * width, width);
    HWY_DYNAMIC_DISPATCH(AdjointRows)
    (scan, group, scan.C + target * scan.bc_stride, from, state.data(), rows + g * width);
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
