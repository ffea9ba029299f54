// Whole maps of single channels: of alpha, of one state, of the decay alone. Their size, not their
// arithmetic, is what they cost, so each is a plain recurrence down its columns.
#include <algorithm>

#include "server/base/array.h"
#include "server/base/check.h"
#include "server/kernels/hidden_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/channel_maps.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

#ifndef MAMBASCOPE_KERNELS_CHANNEL_MAPS_ONCE_
#define MAMBASCOPE_KERNELS_CHANNEL_MAPS_ONCE_
namespace mambascope::kernels {

// Columns of a map that are computed together: their states, [states, 64], stay in the first cache.
constexpr int64_t kColumns = 64;

// One map: the states [first_state, first_state + states) of one channel, summed.
struct MapJob {
  int64_t channel, first_state, states;
  bool decay_only;  // C = 1 and Bbar = 1
  float* map;       // [tokens, tokens]
};

}  // namespace mambascope::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

// Columns [begin, begin + kColumns) of one map. h[n, j] is the decayed Bbar[j, n] at row i; zero
// until token j has been read, so the upper triangle needs no case of its own.
void MapColumns(const ScanParameters& scan, const MapJob& job, int64_t begin) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const int64_t columns = std::min(kColumns, scan.tokens - begin);
  Array<float> h(job.states * kColumns), A(job.states + lanes), decay(job.states + lanes);
  std::fill(h.begin(), h.end(), 0.0f);
  std::fill(A.begin(), A.end(), 0.0f);
  for (int64_t n = 0; n < job.states; ++n) {
    A[n] = scan.A[(job.first_state + n) * scan.d_inner + job.channel] * 1.44269504f;
  }
  for (int64_t i = 0; i < begin; ++i) {
    std::fill_n(job.map + i * scan.tokens + begin, columns, 0.0f);
  }
  HWY_ALIGN float row[kColumns];
  for (int64_t i = begin; i < scan.tokens; ++i) {
    const float delta = scan.delta[i * scan.d_inner + job.channel];
    const float* B = scan.B + i * scan.bc_stride + job.first_state;
    const float* C = scan.C + i * scan.bc_stride + job.first_state;
    for (int64_t n = 0; n < job.states; n += lanes) {
      const Vec exponent = hn::Mul(hn::Set(d, delta), hn::Load(d, A.data() + n));
      hn::Store(Exp2NonPositive(d, exponent), d, decay.data() + n);
    }
    std::fill_n(row, kColumns, 0.0f);
    for (int64_t n = 0; n < job.states; ++n) {
      float* h_n = h.data() + n * kColumns;
      const Vec factor = hn::Set(d, decay[n]);
      for (int64_t j = 0; j < kColumns; j += lanes) {
        hn::Store(hn::Mul(hn::Load(d, h_n + j), factor), d, h_n + j);
      }
      if (i - begin < columns) h_n[i - begin] = job.decay_only ? 1.0f : delta * B[n];
      const Vec c = hn::Set(d, job.decay_only ? 1.0f : C[n]);
      for (int64_t j = 0; j < kColumns; j += lanes) {
        hn::Store(hn::MulAdd(c, hn::Load(d, h_n + j), hn::Load(d, row + j)), d, row + j);
      }
    }
    std::copy_n(row, columns, job.map + i * scan.tokens + begin);
  }
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {
namespace {

HWY_EXPORT(MapColumns);

// The maps job(0) .. job(maps - 1).
template <class Job>
void Maps(ThreadPool& pool, const ScanParameters& scan, size_t maps, const Job& job) {
  const int64_t blocks = (scan.tokens + kColumns - 1) / kColumns;
  pool.Run(static_cast<int64_t>(maps) * blocks, [&](int64_t task) {
    HWY_DYNAMIC_DISPATCH(MapColumns)(scan, job(task / blocks), task % blocks * kColumns);
  });
}

}  // namespace

void ChannelMaps(ThreadPool& pool, const ScanParameters& scan, std::span<const int32_t> channels,
                 float* maps) {
  for (const int32_t channel : channels) MS_CHECK(0 <= channel && channel < scan.d_inner);
  Maps(pool, scan, channels.size(), [&](int64_t c) {
    return MapJob{channels[c], 0, scan.d_state, false, maps + c * scan.tokens * scan.tokens};
  });
}

void StateMaps(ThreadPool& pool, const ScanParameters& scan, int32_t channel,
               std::span<const int32_t> states, float* maps) {
  MS_CHECK(0 <= channel && channel < scan.d_inner);
  for (const int32_t state : states) MS_CHECK(0 <= state && state < scan.d_state);
  Maps(pool, scan, states.size(), [&](int64_t s) {
    return MapJob{channel, states[s], 1, false, maps + s * scan.tokens * scan.tokens};
  });
}

void DecayMaps(ThreadPool& pool, const ScanParameters& scan, int32_t channel,
               std::span<const int32_t> states, float* decay) {
  MS_CHECK(0 <= channel && channel < scan.d_inner);
  for (const int32_t state : states) MS_CHECK(0 <= state && state < scan.d_state);
  Maps(pool, scan, states.size(), [&](int64_t s) {
    return MapJob{channel, states[s], 1, true, decay + s * scan.tokens * scan.tokens};
  });
}

}  // namespace mambascope::kernels
#endif
