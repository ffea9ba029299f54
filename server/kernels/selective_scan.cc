#include "server/kernels/selective_scan.h"

#include <algorithm>

#include "server/base/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/selective_scan.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {
namespace {

// Tokens whose delta, delta x and y wait in the first-level cache between the three loops below,
// and whose rows of B and C stay there for all channels of the task. Median ms of 9 alternating
// rounds (1024 tokens, 1536 channels, one thread's CPU time, Sapphire Rapids VM under a load of
// 12): chunks of 8 took 7.0, 11.2, 32 for d_state 8, 16, 64, of 16 took 8.2, 11.7, 39 with
// overlapping ranges; 32 and 64 were slower in another run of 7 (13.9 and 13.8 for d_state 16,
// where 8 took 11.0).
constexpr int64_t kChunkTokens = 8;
constexpr int64_t kMaxStates = 256;
constexpr size_t kMaxLanes = HWY_MAX_BYTES / sizeof(float);

struct Scratch {
  HWY_ALIGN float delta[kChunkTokens][kMaxLanes];
  HWY_ALIGN float drive[kChunkTokens][kMaxLanes];  // delta x
  HWY_ALIGN float y[kChunkTokens][kMaxLanes];
  HWY_ALIGN float A[kMaxStates][kMaxLanes];  // times log2(e)
  HWY_ALIGN float state[kMaxStates][kMaxLanes];
};

template <bool kAllLanes>
HWY_INLINE Vec LoadLanes(F32 d, const float* p, size_t count) {
  return kAllLanes ? hn::LoadU(d, p) : LoadPart(d, p, count);
}

template <bool kAllLanes>
HWY_INLINE void StoreLanes(Vec v, F32 d, float* p, size_t count) {
  kAllLanes ? hn::StoreU(v, d, p) : StorePart(v, d, p, count);
}

// The rows of a chunk lie kilobytes apart, one cache line of each for a register of channels, which
// no hardware prefetcher follows: while one register's recurrence runs, the next one's lines are
// fetched, into the second-level cache because such a stride meets few sets of the first. In the
// runs named at kChunkTokens: 14.1 ms without, 11.2 ms with it for d_state 16.
struct NextRegister {
  const float *dt, *x, *z;
  float* gated;
  int64_t stride, z_stride;
  HWY_INLINE void Prefetch(int64_t token) const {
    __builtin_prefetch(dt + token * stride, /*write=*/0, /*second level*/ 2);
    __builtin_prefetch(x + token * stride, 0, 2);
    __builtin_prefetch(z + token * z_stride, 0, 2);
    __builtin_prefetch(gated + token * stride, /*write=*/1, 2);
  }
};

// One token's effect on one state: state -> decay * state + drive * B.
HWY_INLINE Vec Advance(F32 d, Vec delta, Vec drive, const float* A, float B, Vec state) {
  const Vec decay = Exp2NonPositive(d, hn::Mul(delta, hn::Load(d, A)));
  return hn::MulAdd(decay, state, hn::Mul(drive, hn::Set(d, B)));
}

// y and the states of the tokens in the scratch; B and C point at the first one's row. The sum over
// states is taken in two halves, even and odd, which do not wait for each other.
void Recur(const ScanInputs& in, const float* B, const float* C, int64_t tokens,
           const NextRegister& next, Scratch& s) {
  const F32 d;
  for (int64_t i = 0; i < tokens; ++i, B += in.bc_stride, C += in.bc_stride) {
    next.Prefetch(i);
    const Vec delta = hn::Load(d, s.delta[i]), drive = hn::Load(d, s.drive[i]);
    Vec even = hn::Zero(d), odd = hn::Zero(d);
    for (int64_t n = 0; n < in.d_state; ++n) {
      const Vec state = Advance(d, delta, drive, s.A[n], B[n], hn::Load(d, s.state[n]));
      hn::Store(state, d, s.state[n]);
      Vec& y = n % 2 == 0 ? even : odd;
      y = hn::MulAdd(state, hn::Set(d, C[n]), y);
    }
    hn::Store(hn::Add(even, odd), d, s.y[i]);
  }
}

// The same for d_state = kStates, with the states in registers.
template <int kStates>
void RecurInRegisters(const ScanInputs& in, const float* B, const float* C, int64_t tokens,
                      const NextRegister& next, Scratch& s) {
  const F32 d;
  Vec state[kStates];
#pragma GCC unroll 16
  for (int n = 0; n < kStates; ++n) state[n] = hn::Load(d, s.state[n]);
  for (int64_t i = 0; i < tokens; ++i, B += in.bc_stride, C += in.bc_stride) {
    next.Prefetch(i);
    const Vec delta = hn::Load(d, s.delta[i]), drive = hn::Load(d, s.drive[i]);
    Vec even = hn::Zero(d), odd = hn::Zero(d);
#pragma GCC unroll 16
    for (int n = 0; n < kStates; n += 2) {
      state[n] = Advance(d, delta, drive, s.A[n], B[n], state[n]);
      even = hn::MulAdd(state[n], hn::Set(d, C[n]), even);
      state[n + 1] = Advance(d, delta, drive, s.A[n + 1], B[n + 1], state[n + 1]);
      odd = hn::MulAdd(state[n + 1], hn::Set(d, C[n + 1]), odd);
    }
    hn::Store(hn::Add(even, odd), d, s.y[i]);
  }
#pragma GCC unroll 16
  for (int n = 0; n < kStates; ++n) hn::Store(state[n], d, s.state[n]);
}

template <bool kAllLanes>
void ScanRegister(const ScanInputs& in, const ScanOutputs& out, int64_t channel, size_t count,
                  int64_t sequence, int64_t begin, int64_t end, Scratch& s) {
  const F32 d;
  const int64_t D = in.d_inner, tokens = end - begin;
  const Vec log2_e = hn::Set(d, 1.44269504f);
  float* ssm_state = out.ssm_state[sequence] + channel;
  for (int64_t n = 0; n < in.d_state; ++n) {
    hn::Store(hn::Mul(LoadLanes<kAllLanes>(d, in.A + n * D + channel, count), log2_e), d, s.A[n]);
    hn::Store(LoadLanes<kAllLanes>(d, ssm_state + n * D, count), d, s.state[n]);
  }
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t at = (begin + i) * D + channel;
    const Vec delta = Softplus(d, LoadLanes<kAllLanes>(d, in.dt + at, count));
    hn::Store(delta, d, s.delta[i]);
    hn::Store(hn::Mul(delta, LoadLanes<kAllLanes>(d, in.x + at, count)), d, s.drive[i]);
  }
  const int64_t after = begin * D + std::min(channel + static_cast<int64_t>(count), D - 1);
  const NextRegister next{in.dt + after,
                          in.x + after,
                          in.z + begin * in.z_stride + (after - begin * D),
                          out.gated + after,
                          D,
                          in.z_stride};
  const float *B = in.B + begin * in.bc_stride, *C = in.C + begin * in.bc_stride;
  switch (in.d_state) {
    case 16:
      RecurInRegisters<16>(in, B, C, tokens, next, s);
      break;
    case 8:
      RecurInRegisters<8>(in, B, C, tokens, next, s);
      break;
    default:
      Recur(in, B, C, tokens, next, s);
  }
  const Vec skip = LoadLanes<kAllLanes>(d, in.D + channel, count);
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t at = (begin + i) * D + channel;
    const Vec y = hn::Load(d, s.y[i]);
    if (out.y != nullptr) StoreLanes<kAllLanes>(y, d, out.y + at, count);
    const Vec x = LoadLanes<kAllLanes>(d, in.x + at, count);
    const Vec z = LoadLanes<kAllLanes>(d, in.z + (begin + i) * in.z_stride + channel, count);
    StoreLanes<kAllLanes>(hn::Mul(hn::MulAdd(skip, x, y), Silu(d, z)), d, out.gated + at, count);
  }
  for (int64_t n = 0; n < in.d_state; ++n) {
    StoreLanes<kAllLanes>(hn::Load(d, s.state[n]), d, ssm_state + n * D, count);
  }
}

void ScanRange(const ScanInputs& in, const ScanOutputs& out, int64_t begin, int64_t end) {
  const int64_t lanes = hn::Lanes(F32());
  Scratch scratch;
  for (size_t sequence = 0; sequence + 1 < in.seq_start.size(); ++sequence) {
    const int64_t last = in.seq_start[sequence + 1];
    for (int64_t i = in.seq_start[sequence]; i < last; i += kChunkTokens) {
      const int64_t chunk_end = std::min(i + kChunkTokens, last);
      int64_t channel = begin;
      for (; channel + lanes <= end; channel += lanes) {
        ScanRegister<true>(in, out, channel, lanes, sequence, i, chunk_end, scratch);
      }
      if (channel < end) {
        ScanRegister<false>(in, out, channel, end - channel, sequence, i, chunk_end, scratch);
      }
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
constexpr int64_t kRegisterChannels = 16;
// Below this many exponentials, waking another thread costs more than the work.
constexpr int64_t kWorthSplitting = 16384;

}  // namespace

void SelectiveScan(ThreadPool& pool, const ScanInputs& in, const ScanOutputs& out) {
  MS_CHECK(in.d_state >= 1 && in.d_state <= 256 && in.z_stride >= in.d_inner);
  MS_CHECK(in.bc_stride >= in.d_state && !in.seq_start.empty());
  MS_CHECK(out.ssm_state.size() + 1 == in.seq_start.size());
  const int64_t tokens = in.seq_start.back() - in.seq_start.front();
  const bool alone = tokens * in.d_inner * in.d_state < kWorthSplitting;
  pool.Split(in.d_inner, alone ? std::max<int64_t>(in.d_inner, 1) : kRegisterChannels,
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
