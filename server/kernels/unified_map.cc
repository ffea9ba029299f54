// Rows of alpha and of unified maps, one channel at a time. What a row sees of earlier strips is a
// product of factors, one multiply-add a state; its own strip comes from the recurrence.
#include "server/kernels/unified_map.h"

#include <algorithm>
#include <cmath>

#include "server/base/array.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernels/unified_map.cc"
#include "hwy/foreach_target.h"
#include "server/kernels/vector_math-inl.h"

#ifndef MAMBASCOPE_KERNELS_UNIFIED_MAP_ONCE_
#define MAMBASCOPE_KERNELS_UNIFIED_MAP_ONCE_
namespace mambascope::kernels {

constexpr int64_t kPad = 16;  // floats of the widest register: states are followed by zeros
inline int64_t PaddedStates(int64_t d_state) { return (d_state + kPad - 1) / kPad * kPad; }

// Where the factors of a map stand; N the padded number of states.
struct FactorViews {
  FactorViews(const float* factors, int64_t tokens, int64_t strips, int64_t N)
      : decay(factors),
        left(decay + tokens * N),
        right(left + tokens * N),
        carry(right + strips * N * kMapStrip) {}
  const float* decay;  // [tokens, N] of each token
  const float* left;   // [tokens, N] C, decayed from before the token's strip to the token
  const float* right;  // [strips, N, kMapStrip] Bbar, decayed from the token to its strip's end
  const float* carry;  // [strips, N] decay over a whole strip
};

}  // namespace mambascope::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace mambascope::kernels::HWY_NAMESPACE {

void Factor(const ScanParameters& scan, int64_t channel, const MapStrips& strips, float* factors) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), N = PaddedStates(scan.d_state);
  const FactorViews views(factors, scan.tokens, strips.count(), N);
  float* const decay = factors;
  float* const left = const_cast<float*>(views.left);
  float* const right = const_cast<float*>(views.right);
  float* const carry = const_cast<float*>(views.carry);
  Array<float> A(N), passed(N);
  std::fill(A.begin(), A.end(), 0.0f);
  for (int64_t n = 0; n < scan.d_state; ++n) {
    A[n] = scan.A[n * scan.d_inner + channel] * 1.44269504f;
  }
  for (int64_t i = 0; i < scan.tokens; ++i) {
    const Vec delta = hn::Set(d, scan.delta[i * scan.d_inner + channel]);
    for (int64_t n = 0; n < N; n += lanes) {
      hn::StoreU(Exp2NonPositive(d, hn::Mul(delta, hn::Load(d, A.data() + n))), d,
                 decay + i * N + n);
    }
  }
  for (int64_t s = 0; s < strips.count(); ++s) {
    const int64_t begin = strips.begin(s), end = strips.end(s);
    std::fill(passed.begin(), passed.end(), 1.0f);
    for (int64_t i = begin; i < end; ++i) {
      const float* C = scan.C + i * scan.bc_stride;
      for (int64_t n = 0; n < N; ++n) {
        passed[n] *= decay[i * N + n];
        left[i * N + n] = n < scan.d_state ? passed[n] * C[n] : 0.0f;
      }
    }
    std::copy(passed.begin(), passed.end(), carry + s * N);
    float* const block = right + s * N * kMapStrip;
    std::fill_n(block, N * kMapStrip, 0.0f);
    std::fill(passed.begin(), passed.end(), 1.0f);
    for (int64_t j = end - 1; j >= begin; --j) {
      const float delta = scan.delta[j * scan.d_inner + channel];
      const float* B = scan.B + j * scan.bc_stride;
      for (int64_t n = 0; n < scan.d_state; ++n) {
        block[n * kMapStrip + j - begin] = passed[n] * (delta * B[n]);
        passed[n] *= decay[j * N + n];
      }
    }
  }
}

// row[j] = sum_n left[n] right[n, j] over a strip's columns.
HWY_INLINE void MultiplyStrip(const float* left, const float* right, int64_t d_state, float* row) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  constexpr int64_t kSide = 2;  // registers side by side
  if (lanes * kSide > kMapStrip) {
    for (int64_t j = 0; j < kMapStrip; j += lanes) {
      Vec sum = hn::Zero(d);
      for (int64_t n = 0; n < d_state; ++n) {
        sum = hn::MulAdd(hn::Set(d, left[n]), hn::LoadU(d, right + n * kMapStrip + j), sum);
      }
      hn::StoreU(sum, d, row + j);
    }
    return;
  }
  for (int64_t j = 0; j < kMapStrip; j += kSide * lanes) {
    Vec a = hn::Zero(d), b = hn::Zero(d);
    for (int64_t n = 0; n < d_state; ++n) {
      const Vec factor = hn::Set(d, left[n]);
      const float* from = right + n * kMapStrip + j;
      a = hn::MulAdd(factor, hn::LoadU(d, from), a);
      b = hn::MulAdd(factor, hn::LoadU(d, from + lanes), b);
    }
    hn::StoreU(a, d, row + j);
    hn::StoreU(b, d, row + j + lanes);
  }
}

void StripRows(const ScanParameters& scan, int64_t channel, const MapStrips& strips,
               const float* factors, int64_t strip, int64_t stride, float* alpha) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), N = PaddedStates(scan.d_state);
  const FactorViews views(factors, scan.tokens, strips.count(), N);
  const int64_t begin = strips.begin(strip), end = strips.end(strip);
  Array<float> h(scan.d_state * kMapStrip), left(N);
  std::fill(h.begin(), h.end(), 0.0f);
  float part[kMapStrip];  // of a short first strip
  for (int64_t i = begin; i < end; ++i) {
    float* const row = alpha + (i - begin) * stride;
    std::copy_n(views.left + i * N, N, left.data());
    for (int64_t s = strip - 1; s >= 0; --s) {
      const int64_t columns = strips.end(s) - strips.begin(s);
      float* const to = columns == kMapStrip ? row + strips.begin(s) : part;
      MultiplyStrip(left.data(), views.right + s * N * kMapStrip, scan.d_state, to);
      if (to == part) std::copy_n(part, columns, row + strips.begin(s));
      for (int64_t n = 0; n < N; n += lanes) {
        hn::Store(hn::Mul(hn::Load(d, left.data() + n), hn::LoadU(d, views.carry + s * N + n)), d,
                  left.data() + n);
      }
    }
    const float delta = scan.delta[i * scan.d_inner + channel];
    const float* B = scan.B + i * scan.bc_stride;
    const float* C = scan.C + i * scan.bc_stride;
    float* const own = row + begin;
    std::fill_n(own, kMapStrip, 0.0f);
    for (int64_t n = 0; n < scan.d_state; ++n) {
      float* const h_n = h.data() + n * kMapStrip;
      const Vec factor = hn::Set(d, views.decay[i * N + n]), c = hn::Set(d, C[n]);
      for (int64_t j = 0; j < kMapStrip; j += lanes) {
        hn::Store(hn::Mul(hn::Load(d, h_n + j), factor), d, h_n + j);
      }
      h_n[i - begin] = delta * B[n];
      for (int64_t j = 0; j < kMapStrip; j += lanes) {
        hn::StoreU(hn::MulAdd(c, hn::Load(d, h_n + j), hn::LoadU(d, own + j)), d, own + j);
      }
    }
  }
}

double Unified(const UnifiedChannel& channel, const float* alpha, int64_t i, float* scratch,
               float* out) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), count = i + 1;
  Vec sum = hn::Zero(d);
  float rest = 0;
  const Vec gate = hn::Set(d, channel.gate[i]);
  int64_t m = 0;
  for (; m + lanes <= i; m += lanes) {  // the last entry has the skip too
    const Vec value =
        hn::Mul(gate, hn::Mul(hn::LoadU(d, alpha + m), hn::LoadU(d, channel.slope + m)));
    sum = hn::Add(sum, value);
    hn::StoreU(value, d, scratch + m);
  }
  for (; m < count; ++m) {
    const float value = alpha[m] + (m == i ? channel.skip : 0.0f);
    scratch[m] = channel.gate[i] * (value * channel.slope[m]);
    rest += scratch[m];
  }
  std::fill_n(scratch + count, channel.taps, 0.0f);
  const float* const weight = channel.weight + channel.taps - 1;
  int64_t j = 0;
  for (; j + lanes <= count; j += lanes) {
    Vec value = hn::Mul(hn::Set(d, weight[0]), hn::LoadU(d, scratch + j));
    for (int64_t k = 1; k < channel.taps; ++k) {
      value = hn::MulAdd(hn::Set(d, weight[-k]), hn::LoadU(d, scratch + j + k), value);
    }
    hn::StoreU(value, d, out + j);
  }
  for (; j < count; ++j) {
    float value = 0;
    for (int64_t k = 0; k < channel.taps; ++k) value += weight[-k] * scratch[j + k];
    out[j] = value;
  }
  return channel.bias * (static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum))) + rest);
}

void AddTo(const float* row, int64_t count, bool magnitude, float* sum) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  int64_t j = 0;
  for (; j + lanes <= count; j += lanes) {
    const Vec value = hn::LoadU(d, row + j);
    hn::StoreU(hn::Add(hn::LoadU(d, sum + j), magnitude ? hn::Abs(value) : value), d, sum + j);
  }
  for (; j < count; ++j) sum[j] += magnitude ? std::fabs(row[j]) : row[j];
}

}  // namespace mambascope::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mambascope::kernels {

HWY_EXPORT(Factor);
HWY_EXPORT(StripRows);
HWY_EXPORT(Unified);
HWY_EXPORT(AddTo);

int64_t MapFactorsSize(int64_t tokens, int64_t d_state) {
  const int64_t strips = (tokens + kMapStrip - 1) / kMapStrip;
  return PaddedStates(d_state) * (2 * tokens + strips * (kMapStrip + 1));
}

void FactorMap(const ScanParameters& scan, int64_t channel, const MapStrips& strips,
               float* factors) {
  HWY_DYNAMIC_DISPATCH(Factor)(scan, channel, strips, factors);
}

void MapStripRows(const ScanParameters& scan, int64_t channel, const MapStrips& strips,
                  const float* factors, int64_t strip, int64_t stride, float* alpha) {
  HWY_DYNAMIC_DISPATCH(StripRows)(scan, channel, strips, factors, strip, stride, alpha);
}

double UnifiedRow(const UnifiedChannel& channel, const float* alpha, int64_t i, float* scratch,
                  float* out) {
  return HWY_DYNAMIC_DISPATCH(Unified)(channel, alpha, i, scratch, out);
}

void AddRowTo(const float* row, int64_t count, bool magnitude, float* sum) {
  HWY_DYNAMIC_DISPATCH(AddTo)(row, count, magnitude, sum);
}

}  // namespace mambascope::kernels
#endif
